import fsspec
import pytest
from commands import train
from store_laws import check_store

from titan_dit.checkpoint.store import URL, location, store_of
from titan_dit.config.section import UserError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_checkpoints_lie_in_a_store_that_cannot_rename(tmp_path, monkeypatch, capsys):
    check_store(f"file://{tmp_path}/run", monkeypatch, capsys)


def test_checkpoints_lie_in_a_store_that_has_no_folders(monkeypatch, capsys):
    url = "memory://bucket/run"
    try:
        check_store(url, monkeypatch, capsys)
    finally:
        fsspec.filesystem("memory").rm("/bucket", recursive=True)


@pytest.mark.parametrize("text", ["s3://bucket/run", "s3://bucket/run/", "s3://bucket/run//"])
def test_a_url_is_joined_as_a_path_is(text):
    url = location(text)
    assert isinstance(url, URL)
    assert str(url / "step-1") == "s3://bucket/run/step-1"
    assert (url / "step-1").parent == url
    assert url.with_name("other") == URL("s3://bucket/other")
    assert url.name == "run"


def test_a_protocol_that_is_none_is_named():
    with pytest.raises(UserError, match=r"\[checkpoint\] nothing://x"):
        store_of(location("nothing://x"))


FLAGS = ("--metrics.tensorboard", "false", "--sampling.every", 0, "--training.steps", 4)
SMALL = ("--model.hidden_size", 32, "--model.num_layers", 2, "--training.global_batch_size", 16)


def test_a_run_on_two_ranks_keeps_its_checkpoints_at_a_url(tmp_path):
    at = ("--checkpoint.dir", f"file://{tmp_path}/store", "--checkpoint.every", 2)
    done = train(*SMALL, *FLAGS, *at, cwd=tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert f"saved file://{tmp_path}/store/step-00000004" in done.stdout
    assert not (tmp_path / "outputs" / "digits" / "checkpoints").exists()
    longer = ("--training.steps", 6)
    again = train(*SMALL, *FLAGS, *longer, *at, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert f"resumed from file://{tmp_path}/store/step-00000004" in again.stdout
