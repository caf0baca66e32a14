"""A run directory of version 0.1: this version resumes, samples and replays it."""

import hashlib
import json
import shutil
import sys
from pathlib import Path

import commands
import pytest
import tomli
import torch
from safetensors.torch import load_file

FIXTURES = Path(__file__).parent / "fixtures"
WAS = json.loads((FIXTURES / "run-0.1.json").read_text())


@pytest.fixture
def folder(tmp_path):
    shutil.unpack_archive(FIXTURES / "run-0.1.tar.gz", tmp_path)
    return tmp_path


def titan_dit(*words, cwd):
    done = commands.run([sys.executable, "-m", "titan_dit", *words], cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_goes_on_with_the_losses_that_version_had(folder):
    words = WAS["continued"]["command"].split()
    titan_dit(*words, cwd=folder)
    rows = {str(row["step"]): row for row in commands.metrics(folder / "run-0.1")}
    for step, was in WAS["continued"]["steps"].items():
        assert rows[step]["loss"] == pytest.approx(was["loss"], rel=1e-6)
        assert rows[step]["grad_norm"] == pytest.approx(was["grad_norm"], rel=1e-5)
        assert rows[step]["skipped_steps"] == was["skipped_steps"]
    job = tomli.loads((folder / "run-0.1" / "config.toml").read_text())["job"]
    assert (job["data_order"], job["initial_weights"]) == ("sort", "generator")


def test_it_begins_again_with_the_weights_and_the_order_that_version_had(folder):
    """Killed before its first checkpoint: nothing but the format of its config tells its age."""
    was = commands.metrics(folder / "run-0.1")
    shutil.rmtree(folder / "run-0.1" / "checkpoints")
    where = ("--config", "run-0.1/config.toml", "--job.dir", "run-0.1")
    titan_dit("train", *where, cwd=folder)
    rows = commands.metrics(folder / "run-0.1")
    assert [row["step"] for row in rows] == list(range(1, 13))
    for row, recorded in zip(rows, was, strict=True):
        assert row["loss"] == pytest.approx(recorded["loss"], rel=1e-6)
        assert row["grad_norm"] == pytest.approx(recorded["grad_norm"], rel=1e-5)


def test_it_draws_the_samples_that_version_drew(folder):
    titan_dit(*WAS["drawn"]["command"].split(), cwd=folder)
    tensors = load_file(folder / "drawn.safetensors")
    assert tensors["labels"].tolist() == WAS["drawn"]["labels"]
    assert tensors["samples"].shape == (8, 1, 8, 8)
    maker, kernels = WAS["cpu"].split(", ")
    same_cpu = maker in Path("/proc/cpuinfo").read_text()
    same_cpu = same_cpu and torch.backends.cpu.get_cpu_capability() == kernels
    if torch.__version__ == WAS["torch"] and same_cpu:  # Else rounding differs.
        found = hashlib.sha256(tensors["samples"].numpy().tobytes()).hexdigest()
        assert found == WAS["drawn"]["samples_sha256"]


@pytest.mark.parametrize("command", [c for c in WAS["replayed"] if c.split()[4] in ("3", "12")])
def test_it_replays_the_steps_that_version_replayed(command, folder):
    said = titan_dit(*command.split(), cwd=folder).splitlines()
    # The key `t` has been renamed.
    assert said == [line.replace("  t ", "  timestep ") for line in WAS["replayed"][command]]
