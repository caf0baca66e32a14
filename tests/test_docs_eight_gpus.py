"""The commands of docs/eight-gpus.md: accepted, of the planned memory, equal losses."""

import re
import subprocess
import sys

import pytest
from commands import ROOT, metrics, run

from titan_dit.checks import validate
from titan_dit.config import catalog, config_file
from titan_dit.plan import resolve

PAGE = (ROOT / "docs" / "eight-gpus.md").read_text()
STUB = """#!/usr/bin/env bash
printf '%s ' "$NGPU" "$@"
echo
"""


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    """Name -> (ranks, flags) of every training command, expanded by a shell."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "run_train.sh").write_text(STUB)
    (folder / "run_train.sh").chmod(0o755)
    blocks = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    script = "\n".join(block for block in blocks if "nvidia-smi" not in block)
    shell = ["bash", "-euo", "pipefail", "-c", script]
    done = subprocess.run(shell, cwd=folder, capture_output=True, text=True, check=True)
    found = {}
    for line in done.stdout.splitlines():
        ranks, *flags = line.split()
        found[flags[flags.index("--job.name") + 1]] = int(ranks), flags
    return found


def test_every_command_is_accepted_on_its_ranks(commands):
    assert len(commands) == PAGE.count("./run_train.sh $")
    layouts = {}
    for name, (ranks, flags) in commands.items():
        config = config_file.load(flags, catalog.variant)
        plan = resolve(config, ranks)
        validate(config, plan)
        layouts[name] = str(plan.sizes)
    assert layouts["hsdp"] == layouts["xl-hsdp"] == "dp_replicate 2 x dp_shard 4"
    assert layouts["tp"] == layouts["xl-async"] == "tp 8"
    assert layouts["shared"] == layouts["xl-pp"] == "pp 4 x dp_shard 2"
    assert layouts["ring"] == layouts["long-ulysses"] == "cp 8"
    assert layouts["fsdp"] == layouts["xl-float8"] == "dp_shard 8"
    assert layouts["one"] == layouts["xl-one"] == "one rank"


def planned():
    """Name -> planned GiB, by the page's table."""
    rows = re.findall(r"^\| (`[^|]*) \| .* \| ([\d.]+) \| no \|$", PAGE, re.MULTILINE)
    return {name: gib for names, gib in rows for name in re.findall("`([^`]*)`", names)}


def test_every_large_command_has_its_planned_memory(commands):
    assert planned().keys() == {name for name in commands if "-" in name}


@pytest.mark.long
def test_the_planned_memory_is_that_of_the_dry_run(commands, tmp_path):
    for name, gib in planned().items():
        ranks, flags = commands[name]
        words = [sys.executable, "-m", "titan_dit.train", *flags, "--dry-run", ranks]
        done = run(words, tmp_path)
        assert f"a device needs {gib} GiB" in done.stdout, f"{name}: {done.stdout}{done.stderr}"


@pytest.mark.long
def test_every_small_layout_has_the_losses_of_one_rank(commands, tmp_path):
    losses = {}
    for name, (ranks, flags) in commands.items():
        if "-" in name:
            continue
        words = [sys.executable, "-m", "titan_dit", "train", *flags]
        done = run(words, tmp_path, NGPU=ranks)
        if name == "base":
            assert done.returncode == 0, done.stdout + done.stderr
            continue
        losses[name] = [row["loss"] for row in metrics(tmp_path / "outputs" / name)]
    assert len(losses) == 9
    for found in losses.values():
        assert found == pytest.approx(losses["one"], abs=5e-7)
