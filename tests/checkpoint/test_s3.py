"""Against an S3-compatible server on loopback: no network, no account."""

import pytest
from commands import train
from store_laws import check_store

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore::Warning")


@pytest.fixture
def bucket(monkeypatch):
    """A bucket of a server that lives as long as the test."""
    s3fs, moto = pytest.importorskip("s3fs"), pytest.importorskip("moto.server")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    files = s3fs.S3FileSystem(use_listings_cache=False)
    name = f"bucket-{port}"
    files.mkdir(name)
    yield f"s3://{name}"
    s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


def test_checkpoints_lie_in_a_bucket(bucket, monkeypatch, capsys):
    check_store(f"{bucket}/run", monkeypatch, capsys)


def test_two_ranks_train_into_a_bucket_and_one_goes_on(bucket, tmp_path):
    flags = ("--metrics.tensorboard", "false", "--sampling.every", 0, "--model.hidden_size", 32)
    flags += ("--checkpoint.dir", f"{bucket}/run", "--checkpoint.every", 2)
    done = train(*flags, "--training.steps", 4, cwd=tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr
    assert f"saved {bucket}/run/step-00000004" in done.stdout
    done = train(*flags, "--training.steps", 5, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"resumed from {bucket}/run/step-00000004" in done.stdout
