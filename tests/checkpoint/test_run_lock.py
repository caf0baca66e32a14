"""One launch at a time in a run directory: how its locks are written, renewed and given back."""

import contextlib
import os
import threading
import time

import pytest
from locked_runs import begin, far, leave, shorten, whose

from titan_dit.checkpoint import run_lock
from titan_dit.checkpoint.run_lock import Holder, InUse, Lock, hold_locks
from titan_dit.checkpoint.store import Disk, location, store_of
from titan_dit.config.section import UserError


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    shorten(monkeypatch)


@pytest.fixture
def run(tmp_path):
    return tmp_path / "outputs" / "run"


def test_a_run_holds_its_locks_while_it_trains_and_leaves_no_trace_of_them(run):
    def interrupted():
        with hold_locks(run, run / "checkpoints", print):
            assert whose(run) == whose(run / "checkpoints")
            assert whose(run).run == str(run)
            assert whose(run).started == run_lock.start_of(os.getpid())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not run.parent.exists()


def test_what_was_written_meanwhile_stays(run):
    with hold_locks(run, run / "checkpoints", print):
        (run / "metrics.jsonl").touch()
    assert [path.name for path in run.iterdir()] == ["metrics.jsonl"]


def test_a_second_launch_on_this_machine_is_refused_in_a_line_and_the_first_keeps_its_lock(run):
    with hold_locks(run, run / "checkpoints", print):
        first, files = whose(run), sorted(run.rglob("*"))
        with pytest.raises(UserError) as caught, hold_locks(run, run / "checkpoints", print):
            pass
        assert whose(run) == first
        assert sorted(run.rglob("*")) == files
    assert str(caught.value) == (
        f"[job] {run}: in use by pid {os.getpid()} on {first.host} since {first.since}. "
        "Wait for it, stop it, or choose another --job.name."
    )


@pytest.mark.parametrize("url", ["", "file://"])
def test_two_runs_do_not_save_in_one_folder(url, run, tmp_path):
    checkpoints, other = location(f"{url}{tmp_path}/shared"), tmp_path / "outputs" / "other"
    with hold_locks(run, checkpoints, print):
        with pytest.raises(UserError, match=r"--checkpoint\.dir") as caught:
            begin(other, checkpoints)
        assert not other.exists()
    message = str(caught.value)
    assert f"[checkpoint] {checkpoints}: in use by the run {run}, pid {os.getpid()}" in message
    assert begin(other, checkpoints) == []


def test_another_run_does_not_save_among_the_checkpoints_of_one(run, tmp_path):
    with (
        hold_locks(run, run / "checkpoints", print),
        pytest.raises(UserError, match="in use by the run"),
    ):
        begin(tmp_path / "other", run / "checkpoints")


def test_a_lock_is_renewed_and_written_anew_where_it_was_deleted(run, monkeypatch):
    monkeypatch.setattr(run_lock, "BEAT_S", 0.01)
    file = run / run_lock.FILE

    def is_renewed(own):
        with contextlib.suppress(FileNotFoundError):
            return file.stat().st_mtime > 1 and whose(run) == own
        return False

    with hold_locks(run, run / "checkpoints", print):
        own = whose(run)
        for change in (lambda: os.utime(file, (1, 1)), file.unlink):
            change()
            deadline = time.monotonic() + 10
            while not is_renewed(own) and time.monotonic() < deadline:
                time.sleep(0.01)
            assert is_renewed(own)
    assert not run.exists()


def test_a_renewal_that_hangs_holds_up_neither_the_other_lock_nor_the_end(run, monkeypatch):
    monkeypatch.setattr(run_lock, "BEAT_S", 0.05)
    answered, hung, went_on, renew = *(threading.Event() for _ in range(3)), Lock.renew

    def hangs(lock):
        if lock.folder != run:
            went_on.set()
            return renew(lock)
        hung.set()
        answered.wait(10)
        return None

    monkeypatch.setattr(Lock, "renew", hangs)
    began = time.monotonic()
    with hold_locks(run, run / "checkpoints", print):
        assert hung.wait(5)
        assert went_on.wait(5)
    assert time.monotonic() - began < 5
    assert whose(run).pid == os.getpid()  # A late renewal would overwrite the next launch's.
    assert not (run / "checkpoints" / run_lock.FILE).exists()
    answered.set()


def test_a_lock_that_cannot_be_written_costs_no_run_and_is_said(run, tmp_path):
    (tmp_path / "file").touch()
    (line,) = begin(run, tmp_path / "file" / "checkpoints")
    assert line.startswith(f"{tmp_path}/file/checkpoints is not locked against other runs: ")
    said, inside = [], tmp_path / "file" / "run"
    with hold_locks(inside, run / "checkpoints", said.append):
        assert whose(run / "checkpoints").run == str(inside)
    (line,) = said
    assert line.startswith(f"{inside} is not locked against other launches: ")
    assert line.endswith(": Not a directory")


def test_a_lock_that_cannot_be_read_now_is_not_taken_for_a_free_one(run, monkeypatch):
    def too_late(store, file):
        raise TimeoutError("no answer")

    leave(run, far(run))
    said = []
    with monkeypatch.context() as patch:
        patch.setattr(Disk, "open", too_late)
        with hold_locks(run, run / "checkpoints", said.append):
            assert "no answer" in said[0]
            with pytest.raises(TimeoutError):
                Lock(run, Holder.this(run), print).renew()
    assert whose(run).host == "node7"


def test_who_may_write_a_lock_the_umask_decides_and_one_that_may_not_be_is_respected(
    run, monkeypatch
):
    """Members of a group may resume each other's runs."""
    before = os.umask(0o002)
    try:
        with hold_locks(run, None, print):
            assert (run / run_lock.FILE).stat().st_mode & 0o777 == 0o664
            monkeypatch.setattr(run_lock, "open_locked", refused)
            with pytest.raises(UserError, match="in use by pid"):
                begin(run)
            monkeypatch.undo()
    finally:
        os.umask(before)


def refused(path):
    """As for another user's file."""
    raise PermissionError(13, "Permission denied", str(path))


def test_of_launches_that_begin_at_once_one_takes_the_lock(run, monkeypatch):
    taken, refused = [], []
    write = Lock.write

    def slowly(lock):
        time.sleep(0.02)
        write(lock)

    monkeypatch.setattr(Lock, "write", slowly)

    def race():
        lock = Lock(run, Holder.this(run), print)
        try:
            lock.take()
            taken.append(lock)
        except InUse:
            refused.append(lock)

    threads = [threading.Thread(target=race) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(taken), len(refused)) == (1, 7)
    assert whose(run) == taken[0].own
    taken[0].release()


def test_a_lock_in_a_store_has_the_time_of_the_store(tmp_path):
    folder = location(f"file://{tmp_path}/store")
    lock = Lock(folder, Holder.this(tmp_path), print)
    lock.take()
    store = store_of(folder)
    before = store.modified(lock.file)
    time.sleep(0.05)
    assert lock.renew() is None
    assert before < store.modified(lock.file) <= time.time()
    assert lock.read() == lock.own
    lock.release()
    assert store.names(folder) == []


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "9" * 5000, "[]", "{}"])
def test_what_is_no_lock_has_no_holder(text):
    assert Holder.of(text) is None
