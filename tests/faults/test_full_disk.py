"""A disk that is full while checkpoints are written: a small tmpfs of the test's own."""

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
        pytest.skip("no mount of one's own here")
    words = [sys.executable, "-m", "titan_dit.train", "--config", "digits", *map(str, QUICK)]
    words += ["--training.steps", "40", "--checkpoint.every", "10", "--checkpoint.keep", "1"]
    words += ["--checkpoint.dir", str(disk), "--checkpoint.max_failures", "0"]
    # What fills the disk leaves it once the first save has failed.
    script = (
        "mount -t tmpfs -o size=1200k none disk && head -c 1150000 /dev/zero > disk/filler && "
        '{ "$@"; echo "exit code $?"; } 2>&1 | while IFS= read -r line; do echo "$line"; '
        'case $line in *"was not saved"*) rm -f disk/filler ;; esac; done; ls disk/step-*'
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
    assert f"step 10 was not saved in {disk}: No space left on device" in said, said + done.stderr
    assert "Training goes on; the next attempt is at step 20" in said
    assert f"saved {disk}/step-00000020" in said
    assert "exit code 0" in said
    assert "Traceback" not in said
    # One whole checkpoint, and nothing that the failed save left.
    assert "manifest.json" in said.splitlines()
    assert "partial" not in "".join(said.splitlines()[-6:])
