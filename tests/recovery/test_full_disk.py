"""A disk that is full while checkpoints are written: a small tmpfs."""

import shutil
import subprocess
import sys

import pytest
from commands import environment
from running import QUICK

MOUNT = ["unshare", "--mount", "--map-root-user"]


def can_mount(folder):
    if shutil.which("unshare") is None:
        return False
    words = [*MOUNT, "mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder)]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


def test_a_full_disk_costs_a_checkpoint_and_not_the_run(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if not can_mount(disk):
        pytest.skip("cannot mount a tmpfs here")
    words = [sys.executable, "-m", "titan_dit.train", "--config", "digits", *map(str, QUICK)]
    words += ["--training.steps", "400", "--checkpoint.every", "100", "--checkpoint.keep", "1"]
    words += ["--job.dir", str(disk), "--checkpoint.max_failures", "0"]
    # Fill the disk during training, until a save has failed.
    script = (
        "mount -t tmpfs -o size=2m none disk && "
        '{ "$@"; echo "exit code $?"; } 2>&1 | while IFS= read -r line; do echo "$line"; '
        'case $line in "step   5/"*) head -c 4m /dev/zero > disk/filler ;; '
        '*"was not saved"*) rm -f disk/filler ;; esac; done; ls disk/checkpoints/step-*'
    )
    done = subprocess.run(
        [*MOUNT, "bash", "-c", script, "bash", *words],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
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


def test_a_disk_that_is_full_at_the_start_is_one_line(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if not can_mount(disk):
        pytest.skip("cannot mount a tmpfs here")
    words = [sys.executable, "-m", "titan_dit.train", "--config", "digits", *map(str, QUICK)]
    # No inode for the run directory; then one for run.lock, and no space for config.toml.
    script = (
        'mount -t tmpfs -o nr_inodes=1 none disk && "$@" --job.dir disk/run; echo "code $?"; '
        "mount -t tmpfs -o size=12k none disk && mkdir disk/run && head -c 8k /dev/zero > disk/filler"
        '; "$@" --job.dir disk/run --checkpoint.every 0; echo "code $?"'
    )
    done = subprocess.run(
        [*MOUNT, "bash", "-c", script, "bash", *words],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.stdout == "code 2\ncode 2\n"
    wrong = (
        "error: [job] disk/run: No space left on device. Free some space, or set another --job.dir."
    )
    assert done.stderr.splitlines() == [wrong, wrong]
