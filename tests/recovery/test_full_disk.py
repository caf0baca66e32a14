"""A disk that is full while checkpoints are written: a small tmpfs."""

import errno
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from commands import environment
from running import QUICK

from titan_dit.config.operation import MetricsConfig
from titan_dit.config.section import UserError
from titan_dit.data.latents import write_shards
from titan_dit.observe.run_log import RunLog

FULL = "error: [job] {}: No space left on device. Free some space, or set another --job.dir.\n"
MOUNT = ["unshare", "--mount", "--map-root-user"]


def can_mount(folder):
    if shutil.which("unshare") is None:
        return False
    words = [*MOUNT, "mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder)]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


@pytest.fixture
def disk(tmp_path):
    """A folder on which `train` mounts a tmpfs."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if not can_mount(folder):
        pytest.skip("cannot mount a tmpfs here")
    return folder


def train(script, disk, *flags):
    """Run a bash script, whose "$@" is a training command, with mounts of its own."""
    words = [sys.executable, "-m", "titan_dit.train", "--config", "digits", *map(str, QUICK)]
    return subprocess.run(
        [*MOUNT, "bash", "-c", script, "bash", *words, *flags],
        cwd=disk.parent,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_a_full_disk_costs_a_checkpoint_and_not_the_run(disk):
    flags = ["--training.steps", "400", "--checkpoint.every", "100", "--checkpoint.keep", "1"]
    flags += ["--job.dir", str(disk), "--checkpoint.max_failures", "0"]
    # Fill the disk during training, until a save has failed.
    script = (
        "mount -t tmpfs -o size=2m none disk && "
        '{ "$@"; echo "exit code $?"; } 2>&1 | while IFS= read -r line; do echo "$line"; '
        'case $line in "step   5/"*) head -c 4m /dev/zero > disk/filler ;; '
        '*"was not saved"*) rm -f disk/filler ;; esac; done; ls disk/checkpoints/step-*'
    )
    done = train(script, disk, *flags)
    said = done.stdout
    assert f"step 100 was not saved in {disk}/checkpoints: No space left on device" in said, (
        said + done.stderr
    )
    assert "Training continues; the next attempt is at step 200" in said
    assert f"saved {disk}/checkpoints/step-00000200" in said
    assert "metrics could not be written: [Errno 28] No space left on device" in said
    assert said.count("could not be written") <= 3  # Once for each thing, not for each step.
    assert "exit code 0" in said
    assert "Traceback" not in said
    # One whole checkpoint, and nothing that the failed save left.
    assert "manifest.json" in said.splitlines()
    assert "partial" not in "".join(said.splitlines()[-6:])


def test_full_shared_memory_ends_the_run_at_once(disk):
    """Docker gives 64 MB; here it is 1 MB, and a batch of one worker 4 MB."""
    latents, labels = torch.zeros(32, 4, 128, 128).half(), torch.arange(32) % 10
    folder = disk.parent / "latents"
    write_shards(folder, latents, labels, num_classes=10, source="x")
    flags = ["--data.name", "latents", "--data.path", str(folder), "--data.num_workers", "2"]
    flags += ["--model.latent_size", "128", "--model.in_channels", "4", "--model.patch_size", "16"]
    flags += ["--training.global_batch_size", "32", "--training.steps", "2"]
    script = 'mount -t tmpfs -o size=1m none /dev/shm && "$@"; echo "code $?"'
    done = train(script, disk, *flags)
    assert done.stdout.endswith("code 1\n")
    line = (
        "error: [data] /dev/shm is full (1 MB): docker run --shm-size=8g, or --data.num_workers 0\n"
    )
    assert done.stderr == line


def test_a_disk_that_is_full_at_the_start_is_one_line(disk):
    # No inode for the run directory.
    script = 'mount -t tmpfs -o nr_inodes=1 none disk && "$@" --job.dir disk/run; echo "code $?"'
    done = train(script, disk)
    assert done.stdout == "code 2\n"
    assert done.stderr == FULL.format("disk/run")


def test_a_disk_that_is_full_after_the_lock_is_one_line(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")  # As `write` raises it: no file.

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(UserError) as caught:
        RunLog(tmp_path, "run", is_written=True).open({}, MetricsConfig(), 0)
    assert f"error: {caught.value}\n" == FULL.format(tmp_path)
