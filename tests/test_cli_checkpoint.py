"""`python -m titan_dit checkpoint list|verify|show` on the checkpoints of a run."""

import sys

import commands
import pytest
from commands import only_error, train


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two checkpoints of two ranks, and an unfinished one."""
    cwd = tmp_path_factory.mktemp("listed")
    flags = ("--model.hidden", 32, "--training.steps", 4, "--checkpoint.every", 2)
    flags += ("--metrics.tensorboard", "false", "--sampling.every", 0)
    done = train(*flags, cwd=cwd, ranks=2)
    assert done.returncode == 0, done.stderr
    return cwd


def checkpoint(*words, cwd):
    return commands.run([sys.executable, "-m", "titan_dit", "checkpoint", *words], cwd)


def test_a_run_is_listed_verified_and_shown(run):
    done = checkpoint("list", "outputs/digits", cwd=run)
    assert done.returncode == 0, done.stderr
    header, *rows, where = done.stdout.splitlines()
    assert header.split() == ["step", "samples", "epoch", "MiB", "age", "files"]
    assert [row.split()[:3] for row in rows] == [["2", "256", "0.14"], ["4", "512", "0.28"]]
    assert all(row.endswith("all") for row in rows)
    assert where.startswith("in outputs/digits/checkpoints")

    done = checkpoint("verify", "outputs/digits", cwd=run)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(": whole, 3 files") == 2

    done = checkpoint("show", "outputs/digits", "--step", "2", "--tensors", "true", cwd=run)
    assert done.returncode == 0, done.stderr
    for words in ("step      2\n", "dp_shard 2", "optimizer 153 tensors", "[training]"):
        assert words in done.stdout
    assert "model.embed.patch.weight" in done.stdout


def test_what_is_damaged_is_named_with_an_exit_code(run):
    folder = run / "outputs/digits/checkpoints/step-00000004"
    file = folder / "__1_0.distcp"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    done = checkpoint("verify", "outputs/digits", cwd=run)
    assert done.returncode == 1
    assert "step-00000004: damaged: __1_0.distcp" in done.stdout
    assert "step-00000002: whole" in done.stdout
    file.write_bytes(data[:-1])
    assert "damaged: __1_0.distcp" in checkpoint("list", "outputs/digits", cwd=run).stdout


@pytest.mark.parametrize("command", ["list", "verify", "show"])
def test_where_there_is_none_an_error_says_so(run, command):
    assert "no checkpoint found" in only_error(checkpoint(command, "outputs", cwd=run))
