"""Whose lock a launch takes over: at once, after a while, or not while it is renewed."""

import contextlib
import dataclasses
import os
import subprocess
import threading
import time

import pytest
from locked_runs import begin, dead_pid, far, holder, leave, shorten, whose

from titan_dit.checkpoint import run_lock
from titan_dit.checkpoint.run_lock import Holder, Lock
from titan_dit.config.section import UserError
from titan_dit.ranks import failure


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    shorten(monkeypatch)


@pytest.fixture
def run(tmp_path):
    return tmp_path / "outputs" / "run"


@contextlib.contextmanager
def renewed(folder, times):
    """Within the block, renew the lock of a folder `times` times, every 0.2 s."""

    def renew():
        for _ in range(times):
            time.sleep(0.2)
            os.utime(folder / run_lock.FILE)

    renewing = threading.Thread(target=renew)
    renewing.start()
    yield
    renewing.join()


def test_a_lock_of_a_process_that_has_ended_is_taken_over_at_once(run):
    for ended in (
        holder(run, pid=dead_pid()),
        holder(run, started="1"),  # Its pid was reused.
    ):
        leave(run, ended)
        assert begin(run) == []


def test_a_process_that_nobody_has_asked_for_its_exit_code_has_ended(run):
    zombie = subprocess.Popen(["true"])
    started = run_lock.start_of(zombie.pid)
    deadline = time.monotonic() + 5
    while run_lock.status(zombie.pid)[0] != "Z" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not run_lock.is_alive(zombie.pid, started)
    zombie.wait()


def test_a_process_that_is_ending_is_waited_for(run, monkeypatch):
    monkeypatch.setattr(run_lock, "EXIT_WAIT_S", 10)
    ending = subprocess.Popen(["sleep", "0.2"])
    threading.Thread(target=ending.wait).start()
    leave(run, holder(run, pid=ending.pid, started=run_lock.start_of(ending.pid)))
    began = time.monotonic()
    assert begin(run) == []
    assert time.monotonic() - began < 5


def test_ranks_of_one_launch_take_the_lock_from_each_other_on_any_machine(run, monkeypatch):
    monkeypatch.setenv(failure.LAUNCH, "one")
    monkeypatch.setattr(run_lock, "STALE_S", 0.2)
    for before in (far(run), holder(run)):
        leave(run, dataclasses.replace(before, launch="one"))
        assert begin(run) == []
    leave(run, holder(run, launch="another"))
    with pytest.raises(UserError, match="in use by pid"):
        begin(run)


def test_another_machines_lock_that_is_renewed_is_respected(run):
    leave(run, far(run), age_s=60)

    refused = pytest.raises(UserError, match=rf"by pid {os.getpid()} on node7 since .*Wait for it")
    with renewed(run, times=2), refused:
        begin(run)
    assert whose(run).host == "node7"


def test_another_machines_holder_that_ends_after_it_was_seen_is_waited_for(run, monkeypatch):
    """A job that Slurm requeues elsewhere finds the lock of the one that is just ending."""
    monkeypatch.setattr(run_lock, "STALE_S", 0.5)
    leave(run, far(run))
    began = time.monotonic()
    with renewed(run, times=1):
        _, line = begin(run)
    assert 0.7 <= time.monotonic() - began < 5
    assert "taking over the stale run.lock" in line


def test_another_machines_lock_that_is_not_renewed_is_taken_over_and_said(run, monkeypatch):
    leave(run, far(run), age_s=run_lock.STALE_S + 5)
    began = time.monotonic()
    _, line = begin(run)
    assert time.monotonic() - began > run_lock.WATCH_S  # Clocks may differ.
    assert line == f"{run}: taking over the stale run.lock of pid {os.getpid()} on node7"

    monkeypatch.setattr(run_lock, "STALE_S", 60.3)
    leave(run, far(run), age_s=60)
    began = time.monotonic()
    waiting, line = begin(run)
    assert 0.1 < time.monotonic() - began < 5
    assert "run.lock of pid" in waiting
    assert "was renewed 60 s ago; it is taken over unless it is renewed" in waiting
    assert "taking over the stale run.lock" in line


def test_both_locks_of_a_lost_machine_are_watched_at_the_same_time(run, monkeypatch):
    monkeypatch.setattr(run_lock, "WATCH_S", 1.0)
    for folder in (run, run / "checkpoints"):
        leave(folder, far(run), age_s=run_lock.STALE_S + 5)
    began = time.monotonic()
    said = begin(run)
    assert 1.0 < time.monotonic() - began < 1.9
    taken = [line.partition(":")[0] for line in said if "taking over" in line]
    assert taken == [str(run), str(run / "checkpoints")]


def test_a_checkpoint_folder_that_is_in_use_is_respected_after_a_long_wait(run, monkeypatch):
    """Its lock is watched from before the wait for the other one, and renewed meanwhile."""
    monkeypatch.setattr(run_lock, "STALE_S", 1.0)
    leave(run, far(run))
    leave(run / "checkpoints", far(run))
    with renewed(run / "checkpoints", times=8), pytest.raises(UserError, match="in use by the run"):
        begin(run)
    assert whose(run / "checkpoints").host == "node7"
    assert not (run / run_lock.FILE).exists()


def test_a_machine_of_the_same_name_is_not_this_one(run):
    """Containers share host names and pids; a reboot changes the boot id."""
    leave(run, holder(run, machine=f"{Holder.this(run).host} another boot", pid=dead_pid()))
    watched = Lock(run, Holder.this(run), print).attempt(None)
    assert watched.is_free(Holder.this(run), watched.stamp) is None


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"pid": 1}', "\x00" * 200])
def test_a_file_that_names_nobody_holds_nobody_up(text, run):
    run.mkdir(parents=True)
    (run / run_lock.FILE).write_text(text)
    assert begin(run) == []


def test_who_was_taken_for_dead_ends_and_leaves_the_run_to_the_other(run, monkeypatch, capsys):
    ended = []

    def end(code):
        ended.append(code)
        raise SystemExit

    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.setattr(run_lock.os, "_exit", end)
    lock = Lock(run, Holder.this(run), print)
    lock.take()
    leave(run, far(run))
    monkeypatch.setattr(run_lock, "BEAT_S", 0.0)
    with pytest.raises(SystemExit):
        run_lock.renew_until(lock, threading.Event())
    assert ended == [failure.USER_ERROR]
    said = capsys.readouterr().err
    # Its own launch continues without this node: a reported error would end the launch.
    lock.own = dataclasses.replace(lock.own, launch="one")
    with pytest.raises(SystemExit):
        run_lock.end_replaced(lock, far(run, launch="one"))
    assert (ended[1:], capsys.readouterr().err) == ([failure.LEFT], "")
    assert said.startswith(f"error: [job] {run}: pid {os.getpid()} on node7 has taken over")
    lock.release()
    assert whose(run).host == "node7"
