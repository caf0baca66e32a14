"""One launch at a time trains into a run directory, and into a folder of checkpoints.

Each holds a `run.lock` while a run goes on: which process of which launch it is, as JSON. Another
launch takes it over at once where that process ran on this machine and has ended. Of other
machines' processes nothing can be known: their locks are renewed every BEAT_S, and taken over after
STALE_S without. Ranks that are started anew, on whatever node, are of the same launch.

A lock decides who may begin, flock that two do not decide at once. flock alone would not do: on NFS
it may outlive a node that has died.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from pathlib import Path

from titan_dit.failure import LAUNCH, LEFT, USER_ERROR, report
from titan_dit.file_lock import open_locked
from titan_dit.section import UserError
from titan_dit.state import process
from titan_dit.state.ranks import Ranks
from titan_dit.state.store import Place, read_text, store_of

FILE = "run.lock"
BEAT_S = 15.0
"""Between two renewals of a lock."""
STALE_S = 120.0
"""A lock of another machine that was not renewed for so long is left behind."""
ENDING_S = 5.0
"""A process of this machine may be about to end: killed, with gigabytes to give back."""
POLL_S = 0.5
"""Between two looks at a lock that may become free."""
GUARD_S = 5.0
"""How long others may take to decide; on NFS a node may have died with the file locked."""
SETTLE_S = 1.0
"""Object stores know no flock: of two launches that write at once, the last one is read by both."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Holder:
    """The first rank of a launch, whose lock it is."""

    run: str
    host: str
    machine: str
    pid: int
    started: str
    launch: str
    since: str
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Of this one time that it took its locks."""

    @classmethod
    def this(cls, run: Path) -> Holder:
        """This process, which begins now."""
        where = str(run.resolve()), socket.gethostname(), process.machine()
        pid, since = os.getpid(), f"{datetime.now():%Y-%m-%d %H:%M}"
        return cls(*where, pid, process.start_of(pid), os.environ.get(LAUNCH, ""), since)

    @classmethod
    def of(cls, text: str) -> Holder | None:
        """Whom a file names; None for a file that a kill has cut short."""
        with suppress(ValueError, TypeError, KeyError):
            values = json.loads(text)
            holder = cls(**{known.name: values[known.name] for known in fields(cls)})
            return holder if isinstance(holder.pid, int) and holder.pid > 0 else None
        return None

    def is_near(self, other: Holder) -> bool:
        """Whether this one can see if the other one lives."""
        return self.machine == other.machine

    def is_of_launch(self, other: Holder) -> bool:
        """Whether one launcher, or several that have met, started both."""
        return bool(self.launch) and self.launch == other.launch

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


@dataclass(frozen=True)
class Watched:
    """A lock of another one, from the first look at it on."""

    holder: Holder
    stamp: float
    """When it had been renewed, at the first look."""
    silent_s: float
    """How long ago that was then."""
    began: float = field(default_factory=time.monotonic)

    @property
    def watched_s(self) -> float:
        """Seconds since the first look."""
        return time.monotonic() - self.began

    def is_free(self, own: Holder, stamp: float) -> bool | None:
        """Whether `own` may take it over, now that it has this `stamp`; None: look again later."""
        if own.is_of_launch(self.holder):
            return True
        if own.is_near(self.holder):
            if not process.is_alive(self.holder.pid, self.holder.started):
                return True
            return None if self.watched_s < ENDING_S else False
        if stamp != self.stamp:
            return False
        return True if self.silent_s + self.watched_s >= STALE_S else None


class InUse(Exception):
    """A lock is another launch's, which goes on."""

    def __init__(self, holder: Holder) -> None:
        super().__init__(str(holder))
        self.holder = holder


class Lock:
    """`run.lock` in one folder. Raises what the disk or the store raises."""

    def __init__(self, folder: Place, own: Holder, say: Say) -> None:
        self.folder, self.own, self.say = folder, own, say
        self.store, self.file = store_of(folder), folder / FILE
        self.made: list[Path] = []
        """Folders that were not there before, the innermost first."""

    def take(self) -> None:
        """Take it, after a while where that has to be seen. Raises InUse."""
        if isinstance(self.folder, Path):
            self.made = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
        watched: Watched | None = None
        try:
            self.store.make(self.folder)
            while (watched := self.attempt(watched)) or not self.has_settled():
                time.sleep(POLL_S)
        except BaseException:
            self.release()
            raise

    def attempt(self, watched: Watched | None) -> Watched | None:
        """Take it if it is free; otherwise what is known of it so far. Raises InUse."""
        with self.alone():
            holder = self.read()
            if holder is None:
                self.write()
                return None
            if watched is None or watched.holder != holder:
                watched = self.look_at(holder)
            is_free = watched.is_free(self.own, self.store.modified(self.file))
            if is_free is False:
                raise InUse(holder)
            if is_free is None:
                return watched
            if self.must_guess(holder):
                self.say(f"{self.folder}: {holder} has left its {FILE}; it is taken over")
            self.write()
            return None

    def look_at(self, holder: Holder) -> Watched:
        """The first look at another one's lock."""
        stamp, silent = self.store.modified(self.file), 0.0
        if self.must_guess(holder):
            # By the clock that stamps the files: those of two machines may differ.
            probe = self.folder / f"{FILE}.{self.own.token}"
            self.store.write(probe, "")
            silent = max(0.0, self.store.modified(probe) - stamp)
            self.store.delete(probe)
            if silent < STALE_S:
                self.say(
                    f"{self.folder}: the {FILE} of {holder} was renewed {silent:.0f} s ago; it is "
                    f"taken over if that does not happen again for {STALE_S - silent:.0f} s"
                )
        return Watched(holder, stamp, silent)

    def must_guess(self, holder: Holder) -> bool:
        """Whether only the lock's age tells if its holder lives."""
        return not self.own.is_near(holder) and not self.own.is_of_launch(holder)

    def renew(self) -> Holder | None:
        """Show that the run goes on; another one, if that has taken the lock over."""
        holder = self.read()
        if holder is None:  # Deleted by hand.
            with self.alone():
                if self.read() is None:
                    self.write()
        elif holder == self.own:
            self.store.renew(self.file)
        else:
            return holder
        return None

    def release(self) -> None:
        """Delete it if it is ours, and folders that nothing was written to."""
        with suppress(Exception), self.alone():
            if self.read() in (None, self.own):
                self.store.delete(self.file)
        for folder in self.made:
            with suppress(OSError):
                folder.rmdir()

    def read(self) -> Holder | None:
        """Whose it is."""
        if not self.store.has(self.file):
            return None
        try:
            return Holder.of(read_text(self.file))
        except (FileNotFoundError, UnicodeDecodeError):
            return None

    def write(self) -> None:
        """Make it ours."""
        self.store.write(self.file, json.dumps(asdict(self.own)) + "\n")

    def has_settled(self) -> bool:
        """Whether what was written is what all will read."""
        if isinstance(self.folder, Path):
            return True
        time.sleep(SETTLE_S)
        return self.read() == self.own

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else decides about it meanwhile, where the file system knows flock."""
        descriptor, deadline = None, time.monotonic() + GUARD_S
        while isinstance(self.file, Path) and descriptor is None and time.monotonic() < deadline:
            try:
                descriptor = open_locked(self.file)
            except BlockingIOError:
                time.sleep(0.02)
        try:
            yield
        finally:
            if descriptor is not None:
                os.close(descriptor)


@contextmanager
def held(run: Path, checkpoints: Place, say: Say) -> Iterator[None]:
    """Within the block this launch alone trains into `run`, and saves in `checkpoints`.

    Every rank calls. Raises UserError, on every rank, where another launch does; nothing is changed
    then.
    """
    locks: list[Lock] = []
    ended = threading.Event()
    thread = threading.Thread(target=keep, args=(locks, ended), name="run lock", daemon=True)
    try:
        Ranks().first(lambda: take(run, checkpoints, say, locks))
        if locks:
            thread.start()
        yield
    finally:
        ended.set()
        if thread.is_alive():
            thread.join(BEAT_S)  # A store that hangs is not waited for.
        for lock in reversed(locks):
            lock.release()


def take(run: Path, checkpoints: Place, say: Say, locks: list[Lock]) -> None:
    """Take both locks, and append them. Raises UserError.

    Checkpoints that cannot be written cost no run: nor does a lock beside them.
    """
    own = Holder.this(run)
    lock = Lock(run, own, say)
    try:
        lock.take()
    except InUse as error:
        raise UserError(
            f"[job] {run}: running here since {error.holder.since} by {error.holder}. Wait for it, "
            "stop it, or choose another --job.name."
        ) from None
    except OSError as error:
        raise UserError(f"[job] {run} cannot be written: {error}") from None
    locks.append(lock)
    if checkpoints.resolve() == run.resolve():
        return
    lock = Lock(checkpoints, own, say)
    try:
        lock.take()
    except InUse as error:
        raise UserError(
            f"[checkpoint] {checkpoints}: the run {error.holder.run} saves here since "
            f"{error.holder.since}, by {error.holder}. Wait for it, stop it, or choose another "
            "--checkpoint.dir."
        ) from None
    except Exception as error:  # Each store has errors of its own.
        reason = " ".join(str(error).split()) or type(error).__name__
        say(f"{checkpoints} is not locked against other runs: {reason}")
        return
    locks.append(lock)


def keep(locks: Sequence[Lock], ended: threading.Event) -> None:
    """In a thread: renew the locks until the run has ended."""
    while not ended.wait(BEAT_S):
        for lock in locks:
            with suppress(Exception):  # A disk that fails now may not at the next beat.
                if holder := lock.renew():
                    leave(lock, holder)


def leave(lock: Lock, holder: Holder) -> None:
    """End this process, whose run is another one's by now: mostly another launch's."""
    if lock.own.is_of_launch(holder):
        # The nodes have met again without this one. A user error would end the job on all of them.
        os._exit(LEFT)
    report(
        f"error: [job] {lock.folder}: {holder} has taken the run over, as this one gave no sign of "
        f"life for {STALE_S:g} s. It goes on there.",
        is_user_error=True,
    )
    os._exit(USER_ERROR)
