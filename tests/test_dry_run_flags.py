"""The flag of a dry run, its script, and the check of memory before a run."""

import subprocess
import sys

import commands
import pytest
import torch
from tiny import tiny_config

from titan_dit.checks.device import check_memory, host_memory, state_bytes
from titan_dit.config.config_file import take_dry_run
from titan_dit.config.section import UserError
from titan_dit.optim.sections import AdamWConfig
from titan_dit.plan import resolve

FLAGS = {
    ("--config", "a", "--dry-run"): (["--config", "a"], 0),
    ("--dry-run", "16", "--config", "a"): (["--config", "a"], 16),
    ("--dry-run=16", "--x.y", "2"): (["--x.y", "2"], 16),
    ("--config", "a"): (["--config", "a"], None),
}


@pytest.mark.parametrize("arguments", FLAGS)
def test_the_flag_is_taken_out_of_the_others(arguments):
    assert take_dry_run(arguments) == FLAGS[arguments]


@pytest.mark.parametrize("values", [["0"], ["many"], ["1", "2"], ["-4"]])
def test_a_world_that_is_no_number_of_ranks_is_refused(values):
    with pytest.raises(UserError, match="--dry-run"):
        take_dry_run(["--config", "a", "--dry-run", *values])


def test_the_state_is_estimated_in_closed_form():
    # 7.3e9 parameters over 16 ranks, one average: 20 bytes each.
    assert (
        state_bytes({"w": torch.Size([7_304_869_904])}, {"w"}, AdamWConfig(), 16, 1)
        == 7_304_869_904 * 20 // 16
    )
    config = tiny_config()
    plan = resolve(config, 1)
    check_memory(plan, config.optimizer, config.ema, 10**9, "the GPU")
    check_memory(plan, config.optimizer, config.ema, None, "the GPU")
    with pytest.raises(UserError, match=r"GiB per rank, but the GPU has .* --dry-run"):
        check_memory(plan, config.optimizer, config.ema, 10**5, "the GPU")


def test_free_memory_is_read_where_linux_says_it(tmp_path):
    file = tmp_path / "meminfo"
    file.write_text("MemTotal:  99 kB\nMemAvailable:   12 kB\n")
    assert host_memory(file) == 12 * 1024
    assert host_memory(tmp_path / "none") > 2**20


def test_the_script_starts_one_process(tmp_path):
    done = subprocess.run(
        [commands.ROOT / "run_train.sh", "--config", "digits", "--dry-run", "3",
         "--training.global_batch_size", "12"],
        cwd=tmp_path, env=commands.environment() | {"PATH": f"{sys.prefix}/bin:/usr/bin:/bin"},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "dry run of digits: 3 ranks" in done.stdout
