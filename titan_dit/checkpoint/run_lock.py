"""The run lock: one launch at a time trains into a run directory and a checkpoint folder.

`run.lock` names the holder (process, host, launch) as JSON. A lock of a dead process on this
machine is taken over at once. Processes on other machines cannot be checked: their locks are
renewed every BEAT_S and become stale after STALE_S without renewal. A lock that is renewed twice
while watched is in use. Restarted ranks belong to the same launch, on any node.

flock only serialises access to the file. It cannot be the lock itself: on NFS a flock can outlive
a dead node.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime
from pathlib import Path

from titan_dit.checkpoint.store import Location, read_text, store_of
from titan_dit.config.section import UserError
from titan_dit.ranks.disk_errors import refuse_full
from titan_dit.ranks.failure import LAUNCH, LEFT, USER_ERROR, report
from titan_dit.ranks.process_group import Ranks
from titan_dit.system import run_files
from titan_dit.system.file_lock import open_locked
from titan_dit.system.files import is_process, reason_of

PROC = Path("/proc")


def this_machine() -> str:
    """Identify the pid namespace: host name, boot id, container.

    The host name alone is not unique: hosts or successive containers may share it.
    """
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append((PROC / "sys/kernel/random/boot_id").read_text().strip())
    with suppress(OSError):
        parts.append(str((PROC / "self/ns/pid").readlink()))
    return " ".join(parts)


def start_of(pid: int) -> str:
    """Start time of a process in clock ticks since boot; empty if unknown."""
    return (status(pid) or ("", ""))[1]


def is_alive(pid: int, started: str) -> bool:
    """Return True if the process with this pid and start time is alive on this machine."""
    if not is_process(pid):
        return False
    found = status(pid)
    if found is None:
        return True  # Not Linux, or processes are hidden: only the pid is known.
    state, since = found
    return state not in ("Z", "X") and since == started


def status(pid: int) -> tuple[str, str] | None:
    """(state, start time): fields 3 and 22 of /proc/PID/stat; None if unreadable."""
    try:
        # Field 2, the program name in brackets, may contain spaces and brackets.
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], fields[19]


FILE = run_files.LOCK
MOST_BYTES = 1 << 16
"""Bytes of a lock that are read; a longer file is no lock."""
BEAT_S = 15.0
"""Interval between renewals."""
STALE_S = 120.0
"""Age after which another machine's lock is stale."""
EXIT_WAIT_S = 5.0
"""Wait for a holder on this machine to exit: a killed process takes time to free its memory."""
WATCH_S = 2 * BEAT_S
"""Watch another machine's lock this long before trusting its age: clocks may differ."""
POLL_S = 0.5
"""Polling interval of a lock that may become free."""
FLOCK_WAIT_S = 5.0
"""Timeout for flock; on NFS a dead node may still hold it."""
SETTLE_S = 1.0
"""Object stores have no flock: after this long both launches read the last writer's lock."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Holder:
    """Owner of a lock: rank 0 of a launch."""

    run: str
    host: str
    machine: str
    pid: int
    started: str
    launch: str
    since: str
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Unique per acquisition."""

    @classmethod
    def this(cls, run: Path) -> Holder:
        """Return a Holder for this process, holding since now."""
        pid = os.getpid()
        return cls(
            run=str(run.resolve()),
            host=socket.gethostname(),
            machine=this_machine(),
            pid=pid,
            started=start_of(pid),
            launch=os.environ.get(LAUNCH, ""),
            since=f"{datetime.now():%Y-%m-%d %H:%M}",
        )

    @classmethod
    def of(cls, text: str) -> Holder | None:
        """Parse a lock file; None if it is truncated, or not a lock."""
        with suppress(ValueError, TypeError, KeyError, RecursionError):
            values = json.loads(text)
            holder = cls(**{known.name: values[known.name] for known in fields(cls)})
            return holder if isinstance(holder.pid, int) and holder.pid > 0 else None
        return None

    def is_near(self, other: Holder) -> bool:
        """True if both are on this machine, where liveness can be checked."""
        return self.machine == other.machine

    def is_of_launch(self, other: Holder) -> bool:
        """True if both ranks were started by the same launch, on any node."""
        return bool(self.launch) and self.launch == other.launch

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


@dataclass(frozen=True)
class Watched:
    """Observations of another holder's lock since the first look."""

    holder: Holder
    stamp: float
    """Time of the last renewal, by the store's clock."""
    silent_s: float
    """Age of `stamp` at the first look; negative if the renewal came later."""
    was_renewed: bool = False
    """True if renewed since the first look. One renewal may be the last; two mean it is alive."""
    began: float = field(default_factory=time.monotonic)

    @property
    def watched_s(self) -> float:
        """Seconds since the first look."""
        return time.monotonic() - self.began

    def is_free(self, own: Holder, stamp: float) -> bool | None:
        """True if `own` may take the lock, False if it is in use, None if undecided yet."""
        if own.is_of_launch(self.holder):
            return True
        if own.is_near(self.holder):
            if not is_alive(self.holder.pid, self.holder.started):
                return True
            return None if self.watched_s < EXIT_WAIT_S else False
        if stamp != self.stamp:
            return False if self.was_renewed else None
        is_stale = self.silent_s + self.watched_s >= STALE_S and self.watched_s >= WATCH_S
        return True if is_stale else None

    def at(self, stamp: float) -> Watched:
        """The lock as seen at a later poll; `stamp`: its modification time then."""
        if stamp == self.stamp:
            return self
        return replace(self, stamp=stamp, silent_s=-self.watched_s, was_renewed=True)


class InUse(Exception):
    """The lock is held by another running launch."""

    def __init__(self, holder: Holder) -> None:
        super().__init__(str(holder))
        self.holder = holder


class Lock:
    """`run.lock` in one folder. Raises the storage back end's errors."""

    def __init__(self, folder: Location, own: Holder, say: Say) -> None:
        self.folder, self.own, self.say = folder, own, say
        self.store, self.file = store_of(folder), folder / FILE
        self.made: list[Path] = []
        """Folders created by `take`, innermost first."""
        self.renewing: threading.Thread | None = None
        self.watched: Watched | None = None
        """Observations of `watch`."""

    def watch(self) -> None:
        """Begin to watch another machine's lock before `take`, which then waits for less."""
        with suppress(Exception):  # `take` reports it.
            holder = self.read()
            if holder is not None and self.is_judged_by_age(holder):
                self.watched = self.look_at(holder)

    def take(self) -> None:
        """Acquire the lock, watching another holder if needed. Raises InUse."""
        if isinstance(self.folder, Path):
            self.made = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
        watched = self.watched
        try:
            self.store.make(self.folder)
            while (watched := self.attempt(watched)) or not self.has_settled():
                time.sleep(POLL_S)
        except BaseException:
            self.release()
            raise

    def attempt(self, watched: Watched | None) -> Watched | None:
        """Acquire the lock if free, else return the observations so far. Raises InUse."""
        with self.exclusive():
            holder = self.read()
            if holder is None:
                self.write()
                return None
            if watched is None or watched.holder != holder:
                watched = self.look_at(holder)
            stamp = self.store.modified(self.file)
            is_free = watched.is_free(self.own, stamp)
            if is_free is False:
                raise InUse(holder)
            if is_free is None:
                return watched.at(stamp)
            if self.is_judged_by_age(holder):
                self.say(f"{self.folder}: taking over the stale {FILE} of {holder}")
            self.write()
            return None

    def look_at(self, holder: Holder) -> Watched:
        """Take a first look at another holder's lock."""
        stamp, silent = self.store.modified(self.file), 0.0
        if self.is_judged_by_age(holder):
            # Measure the age by the file system's clock: two machines' clocks may differ.
            probe = self.folder / f"{FILE}.{self.own.token}"
            self.store.write(probe, "")
            silent = max(0.0, self.store.modified(probe) - stamp)
            self.store.delete(probe)
            wait = max(STALE_S - silent, WATCH_S)
            self.say(
                f"{self.folder}: the {FILE} of {holder} was renewed {silent:.0f} s ago; "
                f"it is taken over unless it is renewed within {wait:.0f} s"
            )
        return Watched(holder, stamp, silent)

    def is_judged_by_age(self, holder: Holder) -> bool:
        """True if only the lock's age shows whether its holder is alive."""
        return not self.own.is_near(holder) and not self.own.is_of_launch(holder)

    def renew(self) -> Holder | None:
        """Renew the lock; return the new holder if another launch has taken it over."""
        holder = self.read()
        if holder is None:  # Deleted by hand.
            with self.exclusive():
                if self.read() is None:
                    self.write()
        elif holder == self.own:
            self.store.renew(self.file)
        else:
            return holder
        return None

    def has_stopped(self, within_s: float) -> bool:
        """Wait up to `within_s` for the renewal thread; return True if it has stopped.

        A lock whose renewal hangs is left to become stale. If it were released, a late write could
        overwrite the next launch's lock.
        """
        if self.renewing is not None:
            self.renewing.join(within_s)
        return self.renewing is None or not self.renewing.is_alive()

    def release(self) -> None:
        """Delete this process's lock, then the folders created by `take` that are empty."""
        with suppress(Exception), self.exclusive():
            if self.read() in (None, self.own):
                self.store.delete(self.file)
        for folder in self.made:
            with suppress(OSError):
                folder.rmdir()

    def read(self) -> Holder | None:
        """Return the holder; None if the file is missing or truncated. May raise OSError."""
        try:
            return Holder.of(read_text(self.file, MOST_BYTES))
        except (FileNotFoundError, UnicodeDecodeError):
            return None

    def write(self) -> None:
        """Write this process as the holder."""
        self.store.write(self.file, json.dumps(asdict(self.own)) + "\n")

    def has_settled(self) -> bool:
        """Return True if this process's write won the race (object stores only)."""
        if isinstance(self.folder, Path):
            return True
        time.sleep(SETTLE_S)
        return self.read() == self.own

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Serialise access across processes, where the file system supports flock."""
        descriptor, deadline = None, time.monotonic() + FLOCK_WAIT_S
        while isinstance(self.file, Path) and descriptor is None and time.monotonic() < deadline:
            try:
                descriptor = open_locked(self.file)
            except BlockingIOError:
                time.sleep(0.02)
            except OSError:  # Without flock, a readable lock is still respected.
                break
        try:
            yield
        finally:
            if descriptor is not None:
                os.close(descriptor)


@contextmanager
def hold_locks(run: Path, checkpoints: Location | None, say: Say) -> Iterator[None]:
    """Hold the locks of the run directory and, unless None, the checkpoint folder. Collective.

    Raises UserError on every rank if another launch holds one; nothing is changed then.
    """
    locks: list[Lock] = []
    ended = threading.Event()
    try:
        Ranks().run_on_first(lambda: take(run, checkpoints, say, locks))
        for lock in locks:  # A thread each: a hanging store must not stall the other renewal.
            lock.renewing = threading.Thread(target=renew_until, args=(lock, ended), daemon=True)
            lock.renewing.start()
        yield
    finally:
        ended.set()
        # In a thread: the disk may hang, and the run's watchdog has ended.
        releasing = threading.Thread(target=release, args=(locks,), daemon=True)
        releasing.start()
        releasing.join(len(locks) * 2 * BEAT_S)


def release(locks: list[Lock]) -> None:
    """Release the locks whose renewal has stopped."""
    for lock in reversed(locks):
        if lock.has_stopped(BEAT_S):
            lock.release()


def take(run: Path, checkpoints: Location | None, say: Say, locks: list[Lock]) -> None:
    """Acquire the lock of each folder and append it to `locks`. Raises UserError if one is in use.

    A lock that cannot be written is only reported, unless the disk is full. The run fails later, at
    its first write there.
    """
    own = Holder.this(run)
    lock = Lock(run, own, say)
    second = None
    if checkpoints is not None and checkpoints.resolve() != run.resolve():
        second = Lock(checkpoints, own, say)
        # At the same time: a lost machine left both locks.
        second.watch()
    try:
        lock.take()
    except InUse as error:
        raise UserError(
            f"[job] {run}: in use by {error.holder} since {error.holder.since}. Wait for it, stop "
            "it, or choose another --job.name."
        ) from None
    except OSError as error:
        refuse_full(error, f"[job] {run}", "--job.dir")
        say(f"{run} is not locked against other launches: {reason_of(error)}")
    else:
        locks.append(lock)
    if second is None:
        return
    try:
        second.take()
    except InUse as error:
        raise UserError(
            f"[checkpoint] {checkpoints}: in use by the run {error.holder.run}, {error.holder}, "
            f"since {error.holder.since}. Wait for it, stop it, or choose another "
            "--checkpoint.dir."
        ) from None
    except Exception as error:  # Each store raises its own.
        refuse_full(error, f"[checkpoint] {checkpoints}", "--checkpoint.dir")
        say(f"{checkpoints} is not locked against other runs: {reason_of(error)}")
    else:
        locks.append(second)


def renew_until(lock: Lock, ended: threading.Event) -> None:
    """Thread: renew the lock until `ended` is set."""
    while not ended.wait(BEAT_S):
        with suppress(Exception):  # The disk may work again at the next renewal.
            if holder := lock.renew():
                end_replaced(lock, holder)


def end_replaced(lock: Lock, holder: Holder) -> None:
    """End this process after `holder` took over its run."""
    if lock.own.is_of_launch(holder):
        # The launch continues without this node; a user error would end it on all nodes.
        os._exit(LEFT)
    report(
        f"error: [job] {lock.folder}: {holder} has taken over this run, because its {FILE} was not "
        f"renewed for {STALE_S:g} s. The run continues there.",
        is_user_error=True,
    )
    os._exit(USER_ERROR)
