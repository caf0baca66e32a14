"""One launch at a time trains into a run directory, and into a folder of checkpoints.

Each holds a `run.lock` while a run goes on: which process of which launch it is, as JSON. Another
launch takes it over at once where that process ran on this machine and has ended. Of other
machines' processes nothing can be known: their locks are renewed every BEAT_S, and taken over after
STALE_S without; one that is renewed twice while a launch looks on is respected. Ranks that are
started anew, on whatever node, are of the same launch.

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime
from pathlib import Path

from titan_dit.checkpoint.store import Place, read_text, store_of
from titan_dit.config.section import UserError
from titan_dit.launcher.failure import LAUNCH, LEFT, USER_ERROR, report
from titan_dit.launcher.ranks import Ranks
from titan_dit.system import process_identity
from titan_dit.system.file_lock import open_locked

FILE = "run.lock"
BEAT_S = 15.0
"""Between two renewals of a lock."""
STALE_S = 120.0
"""A lock of another machine that was not renewed for so long is left behind."""
ENDING_S = 5.0
"""A process of this machine may be about to end: killed, with gigabytes to give back."""
WATCH_S = 2 * BEAT_S
"""Watched for so long before its age counts: some file systems take the clocks of clients."""
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
        where = str(run.resolve()), socket.gethostname(), process_identity.machine()
        pid, since = os.getpid(), f"{datetime.now():%Y-%m-%d %H:%M}"
        return cls(*where, pid, process_identity.start_of(pid), os.environ.get(LAUNCH, ""), since)

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
    """When it was renewed last."""
    silent_s: float
    """How long ago that was at the first look; negative where it came after that."""
    was_renewed: bool = False
    """Since the first look. Once may be a holder's last time; twice, it goes on."""
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
            if not process_identity.is_alive(self.holder.pid, self.holder.started):
                return True
            return None if self.watched_s < ENDING_S else False
        if stamp != self.stamp:
            return False if self.was_renewed else None
        is_stale = self.silent_s + self.watched_s >= STALE_S and self.watched_s >= WATCH_S
        return True if is_stale else None

    def at(self, stamp: float) -> Watched:
        """What is known after a look that found this stamp."""
        if stamp == self.stamp:
            return self
        return replace(self, stamp=stamp, silent_s=-self.watched_s, was_renewed=True)


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
        self.renewing: threading.Thread | None = None

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
            stamp = self.store.modified(self.file)
            is_free = watched.is_free(self.own, stamp)
            if is_free is False:
                raise InUse(holder)
            if is_free is None:
                return watched.at(stamp)
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
            wait = max(STALE_S - silent, WATCH_S)
            self.say(
                f"{self.folder}: the {FILE} of {holder} was renewed {silent:.0f} s ago; "
                f"it is taken over if that does not happen again for {wait:.0f} s"
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

    def has_stopped(self, within_s: float) -> bool:
        """Whether nothing renews it any more, or soon.

        One whose renewal hangs is not released: the renewal might write it after that, over the
        lock of the next launch. It is left to grow old.
        """
        if self.renewing is not None:
            self.renewing.join(within_s)
        return self.renewing is None or not self.renewing.is_alive()

    def release(self) -> None:
        """Delete it if it is ours, and folders that nothing was written to."""
        with suppress(Exception), self.alone():
            if self.read() in (None, self.own):
                self.store.delete(self.file)
        for folder in self.made:
            with suppress(OSError):
                folder.rmdir()

    def read(self) -> Holder | None:
        """Whose it is; None for a file that is missing, not for one that cannot be read now."""
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
            except OSError:  # It may still be read: who holds it is refused all the same.
                break
        try:
            yield
        finally:
            if descriptor is not None:
                os.close(descriptor)


@contextmanager
def held(run: Path, checkpoints: Place | None, say: Say) -> Iterator[None]:
    """Within the block this launch alone trains into `run`, and saves in `checkpoints`, if it does.

    Every rank calls. Raises UserError, on every rank, where another launch does; nothing is changed
    then.
    """
    locks: list[Lock] = []
    ended = threading.Event()
    try:
        Ranks().first(lambda: take(run, checkpoints, say, locks))
        for (
            lock
        ) in locks:  # A thread each: a store that hangs does not let the other lock grow old.
            lock.renewing = threading.Thread(target=keep, args=(lock, ended), daemon=True)
            lock.renewing.start()
        yield
    finally:
        ended.set()
        for lock in reversed(locks):
            if lock.has_stopped(BEAT_S):
                lock.release()


def take(run: Path, checkpoints: Place | None, say: Say, locks: list[Lock]) -> None:
    """Take both locks, and append them. Raises UserError.

    A lock that cannot be written costs no run: where the folder cannot be, its first file says so.
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
        say(f"{run} is not locked against other launches: {reason_of(error)}")
    else:
        locks.append(lock)
    if checkpoints is None or checkpoints.resolve() == run.resolve():
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
        say(f"{checkpoints} is not locked against other runs: {reason_of(error)}")
    else:
        locks.append(lock)


def reason_of(error: Exception) -> str:
    """What an error says, in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def keep(lock: Lock, ended: threading.Event) -> None:
    """In a thread: renew the lock until the run has ended."""
    while not ended.wait(BEAT_S):
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
