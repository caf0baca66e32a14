"""`data encode`, `sample`, `evaluate` on two hosts with a shared folder: the bytes of one host."""

import json
import re
import sys

import numpy as np
import pytest
from commands import run, train
from encoded_sets import save_pictures
from folders_of_files import files_in
from hosts import Network, needs_hosts
from tiny_vae import save_vae

pytestmark = [needs_hosts, pytest.mark.long]

TITAN_DIT = (sys.executable, "-m", "titan_dit")
TORCHRUN = (
    *(sys.executable, "-m", "torch.distributed.run", "--nnodes", 2, "--nproc-per-node", 1),
    *("--rdzv-backend", "c10d", "--rdzv-endpoint", "a:29500", "-m", "--", "titan_dit"),
)
LAUNCHER = {"NNODES": 2, "NGPU": 1, "RDZV_ENDPOINT": "a:29500"}
FEATURES = """
import torch

def project(x):
    rng = torch.Generator().manual_seed(0)
    rows = x.double().flatten(1) / 255
    return rows @ torch.randn(rows.shape[1], 12, generator=rng).double()
"""
ENCODE = ("data", "encode", "--input", "in", "--vae", "vae", "--image-size", 8, "--flip", "true")
ENCODE += ("--batch-size", 2, "--shard-size", 2, "--workers", 1)
SAMPLE = ("sample", "--run", "outputs/digits", "--num", 11, "--batch-size", 4, "--steps", 2)
SAMPLE += ("--device", "cpu", "--vae", "vae")
EVALUATE = ("evaluate", "--run", "outputs/digits", "--num", 60, "--batch-size", 8, "--steps", 2)
EVALUATE += ("--device", "cpu", "--vae", "vae", "--reference", "real.npz")
EVALUATE += ("--features", "tiny_features:project", "--metrics", "fid,kid,prdc")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Pictures, an autoencoder; what one host makes of them: latents, a run, samples, scores."""
    folder = tmp_path_factory.mktemp("hosts")
    save_vae(folder / "vae")
    save_pictures(folder / "in", each=8)
    (folder / "tiny_features.py").write_text(FEATURES)
    pixels = np.random.default_rng(0).integers(0, 256, (60, 8, 8, 3), dtype=np.uint8)
    np.savez(folder / "real.npz", arr_0=pixels)

    def alone(*words):
        done = run((*TITAN_DIT, *words), folder, NGPU=1)
        assert done.returncode == 0, done.stderr

    alone(*ENCODE, "--out", "one/set")
    flags = ("--data.name", "latents", "--data.path", "one/set", "--sampling.every", 0)
    flags += ("--model.latent_size", 4, "--model.in_channels", 2, "--model.num_classes", 3)
    flags += ("--training.steps", 2, "--metrics.tensorboard", "false")
    done = train(*flags, cwd=folder)
    assert done.returncode == 0, done.stderr
    alone(*SAMPLE, "--out", "one.npz")
    alone(*EVALUATE, "--out", "one.json", "--save-samples", "drawn-by-one.npz")
    return folder


def on_two_hosts(folder, net, *words, **variables):
    """Run a command on both hosts at once."""
    runs = [host.start(words, folder, f"said-{host.name}", **variables) for host in net]
    with runs[0], runs[1]:
        codes = [run.end(120) for run in runs]
    said = "".join(run.said for run in runs)
    assert codes == [0, 0], said
    # Not each host for itself.
    assert len(re.findall(r"^wrote ", said, re.MULTILINE)) == 1, said


@pytest.fixture
def net(tmp_path):
    with Network(tmp_path, 2) as net:
        yield net


def test_two_hosts_encode_to_the_bytes_of_one(folder, net):
    on_two_hosts(folder, net, *TORCHRUN, *ENCODE, "--out", "two/set")
    assert files_in(folder / "two" / "set") == files_in(folder / "one" / "set")
    on_two_hosts(folder, net, *TITAN_DIT, *ENCODE, "--out", "other/set", **LAUNCHER)
    assert files_in(folder / "other" / "set") == files_in(folder / "one" / "set")


def test_two_hosts_sample_the_bytes_of_one(folder, net):
    on_two_hosts(folder, net, *TORCHRUN, *SAMPLE, "--out", "two.npz")
    on_two_hosts(folder, net, *TITAN_DIT, *SAMPLE, "--out", "other.npz", **LAUNCHER)
    one, two, other = ((folder / f"{name}.npz").read_bytes() for name in ("one", "two", "other"))
    assert one == two == other


def test_two_hosts_give_the_scores_of_one(folder, net):
    files = ("--out", "two.json", "--save-samples", "drawn-by-two.npz")
    on_two_hosts(folder, net, *TITAN_DIT, *EVALUATE, *files, **LAUNCHER)
    one, two = (json.loads((folder / f"{name}.json").read_text()) for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert "frechet_distance" in one
    for name in one:
        is_score = isinstance(one[name], float)
        assert two[name] == (pytest.approx(one[name], rel=1e-10) if is_score else one[name])
    drawn = [(folder / f"drawn-by-{name}.npz").read_bytes() for name in ("one", "two")]
    assert drawn[0] == drawn[1]
