"""Layouts of two hosts train as one process does, and messages take the right way between them."""

import importlib.util
import os
import shutil
from pathlib import Path

import pytest
from commands import ROOT, metrics, train
from hosts import Network, needs_hosts
from pair import Pair

pytestmark = [needs_hosts, pytest.mark.alone]

FLAGS = ("--metrics.every", 1, "--metrics.tensorboard", "false", "--sampling.every", 0)
FLAGS += ("--training.microbatch_size", 8, "--training.global_batch_size", 32)
FLAGS += ("--precision.dtype", "fp32", "--model.hidden_size", 32, "--model.num_layers", 4)
# Ranks of each host, and what its flags are.
MESHES = {
    "dp": (1, {}),
    "hsdp": (2, {"parallel.dp_replicate": 2}),
    "tp inside, pp between": (2, {"parallel.tp": 2, "parallel.pp": 2}),
    "cp between": (1, {"parallel.cp": 2}),
    "pp, planned": (1, {"parallel.pp": 2}),
    "pp, run time, process group": (
        1,
        {"parallel.pp": 2, "pipeline.order": "run_time", "pipeline.transport": "process_group"},
    ),
    "pp, run time, shared memory": (
        1,
        {"parallel.pp": 2, "pipeline.order": "run_time", "pipeline.transport": "shared_memory"},
    ),
    "pp, run time, nixl": (
        1,
        {"parallel.pp": 2, "pipeline.order": "run_time", "pipeline.transport": "nixl"},
    ),
    "pp over four ranks, run time": (
        2,
        {"parallel.pp": 4, "pipeline.order": "run_time"},
    ),
    "tp inside, pp between, run time": (
        2,
        {"parallel.tp": 2, "parallel.pp": 2, "pipeline.order": "run_time"},
    ),
}
WAYS = {
    "pp, run time, process group": "process group between hosts (1 link)",
    # Shared memory is not chosen between hosts, whatever was asked for.
    "pp, run time, shared memory": "process group between hosts (1 link)",
    "pp, run time, nixl": "nixl between hosts (1 link)",
    "pp over four ranks, run time": "shared memory within a host (2 links), {auto} between hosts",
    "tp inside, pp between, run time": "{auto} between hosts",
}
NIXL = importlib.util.find_spec("nixl")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """100 steps of digits in one process: the gates are open."""
    cwd = tmp_path_factory.mktemp("trained")
    done = train(*FLAGS, "--training.steps", 100, "--checkpoint.every", 100, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return cwd


@pytest.fixture(scope="module")
def alone(trained, tmp_path_factory):
    cwd = tmp_path_factory.mktemp("alone")
    shutil.copytree(trained / "outputs", cwd / "outputs")
    done = train(*FLAGS, "--training.steps", 108, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return metrics(cwd / "outputs" / "digits")[-8:]


@pytest.mark.long
@pytest.mark.parametrize("mesh", MESHES)
def test_eight_steps_of_two_hosts_agree_with_one_process(mesh, trained, alone, tmp_path):
    if mesh.endswith("nixl") and not NIXL:
        pytest.skip("nixl is not installed")
    ranks, given = MESHES[mesh]
    shutil.copytree(trained / "outputs", tmp_path / "outputs")
    words = [word for key, value in given.items() for word in (f"--{key}", value)]
    flags = (*FLAGS, "--training.steps", 108, *words)
    paths = [str(ROOT), *([str(Path(NIXL.origin).parents[1])] if NIXL else [])]
    variables = {"NGPU": ranks, "PYTHONPATH": os.pathsep.join(paths)}
    with Network(tmp_path) as net, Pair(net, tmp_path, *flags, **variables) as pair:
        assert pair.end() == {"a": 0, "b": 0}, pair.said
    rows = metrics(tmp_path / "outputs" / "digits")[-8:]
    assert [row["step"] for row in rows] == list(range(101, 109))
    for row, expected in zip(rows, alone, strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    auto = "nixl" if NIXL else "process group"
    assert WAYS.get(mesh, "").format(auto=auto) in pair.said
