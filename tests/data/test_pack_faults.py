"""Packing that is killed, blocked, damaged or started twice."""

import fcntl
import os
import shutil
import subprocess
import sys
import time

import commands
import pytest
from folders_of_files import class_folders, files_in
from packed_folders import packed, spoil
from refusals import refused

from titan_dit.config import user_text
from titan_dit.config.section import UserError
from titan_dit.data.latents import LatentShards
from titan_dit.data.packing import pack


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """120 files in 20 chunks, six files bad, packed by one worker."""
    root = tmp_path_factory.mktemp("faulty")
    class_folders(root / "in", each=40)
    spoil(root / "in")
    packed(root / "in", root / "one" / "out", shard_size=6)
    return root


def test_a_full_disk_is_one_error_that_names_the_file_and_workers_write_the_same_bytes(faulty):
    output = faulty / "two" / "out"
    # A folder of that name makes the write fail, like a full disk.
    blocked = output / "out-00019.safetensors"
    (blocked / "a").mkdir(parents=True)
    plan = pack.make_job(faulty / "in", output, shard_size=6)
    with pack.claimed(plan, output):
        pass
    message = refused(lambda: packed(faulty / "in", output, workers=2, shard_size=6))
    assert message.startswith(f"[data pack] {output}/out-00019.safetensors cannot be written")
    assert "Name a file, not a folder" in message
    assert "Run the same command again" in message
    assert len(list(output.glob("out-*.safetensors"))) > 9  # At least all others of that worker.
    assert message == refused(lambda: packed(faulty / "in", output, workers=1, shard_size=6))
    shutil.rmtree(blocked)
    packed(faulty / "in", output, shard_size=6)
    assert files_in(output) == files_in(faulty / "one" / "out")


def test_what_is_packed_is_not_packed_again(faulty):
    before = {p: p.stat().st_mtime_ns for p in (faulty / "one" / "out").iterdir()}
    assert packed(faulty / "in", faulty / "one" / "out", shard_size=6) is None
    assert {p: p.stat().st_mtime_ns for p in (faulty / "one" / "out").iterdir()} == before


SLOW = """
import sys, time
from pathlib import Path
from titan_dit.data.packing import pack

read = pack.read_latent
def slowly(*args):
    time.sleep(0.02)
    return read(*args)
pack.read_latent = slowly

if __name__ == "__main__":
    source, output, workers = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    plan = pack.make_job(source, output, shard_size=6)
    print(pack.pack(plan, output, workers, lambda *_: None) is not None)
"""


def start_slowly(faulty, output, workers):
    """Start packing in a process, with workers, that takes 2.4 s to read."""
    script = faulty / "slow.py"
    script.write_text(SLOW)
    return subprocess.Popen(
        [sys.executable, script, faulty / "in", output, str(workers)],
        env=commands.environment(),
        start_new_session=True,
        stderr=subprocess.DEVNULL,
    )


def wait_for_shards(process, output, num):
    deadline = time.monotonic() + 60
    while len(list(output.glob("out-*.json"))) < num:
        assert process.poll() is None, "the machine was too fast"
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_killed_packing_goes_on_and_ends_with_the_same_bytes(faulty, tmp_path):
    output = tmp_path / "out"
    process = start_slowly(faulty, output, 2)
    wait_for_shards(process, output, 5)
    process.kill()
    process.wait()
    assert not (output / "manifest.json").exists()
    deadline = time.monotonic() + 60  # The workers exit with their parent.
    while alive(process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(UserError, match=r"no manifest.json"):
        LatentShards(output)
    finished = {p: p.stat().st_mtime_ns for p in output.glob("out-*.safetensors")}
    assert 5 <= len(finished) < 20
    dropped = packed(faulty / "in", output, workers=1, shard_size=6)
    assert len(dropped) == 6
    assert files_in(output) == files_in(faulty / "one" / "out")
    vouched = sum(p.stat().st_mtime_ns == before for p, before in finished.items())
    assert vouched >= 5  # These were kept.


def alive(group):
    """Return True if a process of the group is alive (not a zombie)."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


class Dying(pack.PackJob):
    """A plan whose worker exits on reading the last class."""

    def read(self, row, budget):
        if "0002" in self.listing.names[row]:
            os._exit(9)
        return super().read(row, budget)


def test_a_dead_worker_is_one_error_and_the_rest_is_kept(faulty, tmp_path):
    plan = Dying(**vars(pack.make_job(faulty / "in", tmp_path / "out", shard_size=6)))
    (tmp_path / "out").mkdir()
    with pytest.raises(RuntimeError, match=r"a worker failed \(exit code 9\)"):
        pack.run_workers(plan, tmp_path / "out", list(range(20)), 1, lambda *_: None)
    # 80 files of two classes come before it, six per shard.
    assert len(list((tmp_path / "out").glob("out-*.json"))) == 13


def test_a_killed_worker_is_an_error_in_words():
    assert "a worker was killed (signal 9): not enough memory?" in str(pack.worker_error(-9, ""))
    assert str(pack.worker_error(1, "[data pack] disk full")) == "[data pack] disk full"


def test_a_shard_that_was_cut_or_belongs_to_another_plan_is_made_anew(
    faulty, tmp_path, monkeypatch
):
    output = tmp_path / "out"
    monkeypatch.setattr(pack, "write_all", lambda *_: None)  # As if killed before the manifest.
    packed(faulty / "in", output, shard_size=6)
    monkeypatch.undo()
    shard = output / "out-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    record = output / "out-00004.json"
    record.write_text(record.read_text().replace('"plan": "', '"plan": "x'))
    other = bytearray((output / "out-00004.safetensors").read_bytes())
    other[-200] ^= 1  # Other contents of the same size.
    (output / "out-00004.safetensors").write_bytes(other)
    (output / "out-00005.json").write_text("{")
    (output / "out-00006.safetensors").unlink()
    (output / "out-00007.safetensors.partial").write_bytes(b"half")
    (output / ".tmpfgFDHt").write_bytes(b"safetensors leaves such where it is killed")
    packed(faulty / "in", output, shard_size=6)
    assert files_in(output) == files_in(faulty / "one" / "out")


def test_a_dataset_that_lost_shards_gets_those_back(faulty, tmp_path):
    output = tmp_path / "out"
    packed(faulty / "in", output, shard_size=6)
    (output / "out-00003.safetensors").unlink()
    cut = output / "out-00007.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1])
    kept = {p: p.stat().st_mtime_ns for p in output.glob("*0[0124569].safetensors")}
    assert len(packed(faulty / "in", output, shard_size=6)) == 6
    assert files_in(output) == files_in(faulty / "one" / "out")
    assert {p: p.stat().st_mtime_ns for p in kept} == kept
    # Without the report, the dropped files are unknown: those chunks are packed again.
    (output / "dropped.json").unlink()
    (output / "out-00003.safetensors").unlink()
    assert len(packed(faulty / "in", output, shard_size=6)) == 6
    assert files_in(output) == files_in(faulty / "one" / "out")


def test_a_damaged_list_of_dropped_files_is_one_line(faulty, tmp_path, monkeypatch):
    output = tmp_path / "out"
    packed(faulty / "in", output, shard_size=6)
    monkeypatch.setattr(user_text, "MAX_BYTES", 10)  # The list may be longer: it is of 120 files.
    assert packed(faulty / "in", output, shard_size=6) is None
    for text in ("[1]", "5", '[{"file": "a"}]'):
        (output / "dropped.json").write_text(text)
        said = refused(lambda: packed(faulty / "in", output, shard_size=6))
        assert said.startswith(f"{output}/dropped.json is no list of dropped files. Delete it")


def test_two_processes_do_not_pack_into_one_folder(tmp_path):
    class_folders(tmp_path / "in")
    plan = pack.make_job(tmp_path / "in", tmp_path / "out")
    (tmp_path / "out").mkdir()
    with pack.claimed(plan, tmp_path / "out"):
        message = refused(lambda: packed(tmp_path / "in", tmp_path / "out"))
    assert "another process is packing" in message


def test_a_claim_that_was_removed_meanwhile_is_taken_anew(tmp_path, monkeypatch):
    flock = fcntl.flock
    removed = []

    def remove_first(descriptor, how):
        if not removed:  # As if its holder had finished between our open and our lock.
            removed.append((tmp_path / "out" / "pack.json").unlink())
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    class_folders(tmp_path / "in")
    plan = pack.make_job(tmp_path / "in", tmp_path / "out")
    (tmp_path / "out").mkdir()
    with pack.claimed(plan, tmp_path / "out"):
        assert plan.digest in (tmp_path / "out" / "pack.json").read_text()
    assert removed


def test_a_killed_writer_leaves_nothing_that_stops_the_next(tmp_path):
    class_folders(tmp_path / "in")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "pack.json").write_text("")  # Killed before its first line.
    assert packed(tmp_path / "in", tmp_path / "out", shard_size=4) == []
    assert "pack.json" not in files_in(tmp_path / "out")
