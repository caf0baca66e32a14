"""Holders and locks of runs, as this launch or another one leaves them."""

import dataclasses
import json
import os
import subprocess
import time

from titan_dit.checkpoint import run_lock
from titan_dit.checkpoint.run_lock import Holder, hold_locks
from titan_dit.ranks import failure


def shorten(monkeypatch):
    """Short timeouts; no launch name."""
    monkeypatch.setattr(run_lock, "EXIT_WAIT_S", 0.1)
    monkeypatch.setattr(run_lock, "POLL_S", 0.01)
    monkeypatch.setattr(run_lock, "WATCH_S", 0.1)
    monkeypatch.setattr(run_lock, "SETTLE_S", 0.01)
    monkeypatch.delenv(failure.LAUNCH, raising=False)


def holder(run, **changes):
    """This process as the holder, with changes."""
    return dataclasses.replace(Holder.this(run), **changes)


def far(run, **changes):
    """A holder on another machine, with a pid that is alive here."""
    return holder(run, host="node7", machine="node7 another boot", pid=os.getpid(), **changes)


def leave(folder, whose, age_s=0.0):
    """Write a lock of this age."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / run_lock.FILE
    file.write_text(json.dumps(dataclasses.asdict(whose)))
    os.utime(file, (time.time() - age_s,) * 2)


def whose(folder):
    return Holder.of((folder / run_lock.FILE).read_text())


def begin(run, checkpoints=None):
    """Acquire and release the locks; return the console lines."""
    said = []
    with hold_locks(run, checkpoints or run / "checkpoints", said.append):
        assert whose(run).pid == os.getpid()
    assert not list(run.parent.rglob(f"{run_lock.FILE}*"))
    return said


def dead_pid():
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid
