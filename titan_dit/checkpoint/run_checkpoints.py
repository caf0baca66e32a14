"""The checkpoints of one run: asynchronous saves, retention, failed saves.

Saves are written by a thread while training goes on. A path that a user gives may name the run
directory, its checkpoints folder or one checkpoint: `resolve`.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_dit.checkpoint.checkpoint import write
from titan_dit.checkpoint.planning import Plans
from titan_dit.checkpoint.staging import Staging, TensorTree
from titan_dit.checkpoint.store import MANIFEST, Location, location, store_of
from titan_dit.config import config_file
from titan_dit.config.operation import CheckpointConfig
from titan_dit.config.section import UserError
from titan_dit.ranks.failure import SAVED, Disruption, show
from titan_dit.ranks.process_group import Failed, Ranks
from titan_dit.system import run_files
from titan_dit.system.files import PARTIAL

if TYPE_CHECKING:
    from titan_dit.checkpoint.averages import Snapshots


NAME = re.compile(r"step-(\d{8,})")
LONG_WAIT_S = 1.0
"""Waits for the previous save longer than this are reported."""


class Checkpoints:
    """The folders `step-00000100`, `step-00000200`, ...; at most one save runs at a time."""

    kind, rarer = "checkpoint", "a larger [checkpoint] every"
    """Noun for what is saved, and the key that makes saves rarer, for messages."""

    def __init__(self, folder: Location, settings: CheckpointConfig | None = None) -> None:
        self.folder = folder
        self.settings = settings or CheckpointConfig()
        self.staging = Staging()
        self.plans = Plans()
        self.ranks: Ranks | None = None
        self.thread: threading.Thread | None = None
        self.messages: deque[str] = deque()
        self.failures: list[str] = []
        """Causes of the failed saves since the last good one."""
        self.snapshots: Snapshots | None = None
        """Snapshots of the run's power-function averages, saved beside its checkpoints."""

    def folders(self) -> list[Location]:
        """Every folder with a checkpoint's name, complete or damaged, oldest first."""
        names = [name for name in store_of(self.folder).names(self.folder) if NAME.fullmatch(name)]
        return sorted((self.folder / name for name in names), key=step_of)

    def complete(self) -> list[Location]:
        """Every checkpoint with a manifest, oldest first."""
        store = store_of(self.folder)
        return [path for path in self.folders() if store.has(path / MANIFEST)]

    def takes_snapshot(self, step: int) -> bool:
        """True if `save` saves a snapshot of the averages after `step`."""
        return self.snapshots is not None and self.snapshots.is_due(step)

    def newest(self) -> Location | None:
        """The newest checkpoint that has a manifest, or None."""
        return next(reversed(self.complete()), None)

    def save(
        self, step: int, tensors: TensorTree, record: Mapping[str, Any], *, whole: bool = True
    ) -> Location:
        """Start saving the checkpoint of `step`; return its final path. Collective.

        A snapshot of the averages is saved first, if due. `whole=False` saves only the snapshot.

        `record` holds plain values: step, cursor, counters, config. Returns once `tensors` may
        change again; `poll` reports the outcome. Raises UserError on every rank after
        `max_failures` consecutive failed saves.
        """
        path = self.folder / f"step-{step:08d}"
        if self.snapshots:
            self.snapshots.save_due(step, tensors["ema"], record)
        if not whole:
            return path
        self.wait()
        self.check_failures()
        self.ranks = self.ranks or Ranks.with_own_group()
        if not self.settings.async_save:
            self.write(step, path, tensors, record)
            return path
        begin = None
        try:
            tensors = self.staging.copy(tensors)
        except (RuntimeError, MemoryError) as error:  # Raised later, on all ranks.
            begin = raise_later(error)
        arguments = (step, path, tensors, record, begin)
        # A daemon thread: the process can exit on an error without waiting for the save.
        self.thread = threading.Thread(target=self.write_in_background, args=arguments, daemon=True)
        self.thread.start()
        return path

    def write_in_background(self, step: int, *arguments: Any) -> None:
        """Run `write` in the thread; record errors instead of raising them."""
        try:
            self.write(step, *arguments)
        except Exception as error:  # A rank died: the next step reports it.
            assert self.ranks
            self.record_failure(step, self.ranks.describe(error))

    def write(
        self,
        step: int,
        path: Location,
        tensors: TensorTree,
        record: Mapping[str, Any],
        begin: Callable[[], None] | None = None,
    ) -> None:
        """Write the checkpoint, record the outcome and prune old ones."""
        assert self.ranks
        if self.snapshots:
            # A run that resumes from this checkpoint does not take the earlier ones again.
            self.snapshots.join()
        try:
            write(path, tensors, record, self.ranks, begin, self.plans)
        except Failed as error:
            self.record_failure(step, str(error))
            return
        self.failures.clear()
        self.record_success(step, path)
        if self.ranks.is_first:
            with contextlib.suppress(Exception):
                self.prune(record)

    def record_success(self, step: int, path: Location) -> None:
        """Record a complete save; the launcher counts its restarts anew."""
        show(SAVED, str(step))
        self.messages.append(f"saved {path}")

    def record_failure(self, step: int, cause: str) -> None:
        """Record a failed save."""
        every = self.settings.every
        at = f" at step {(step // every + 1) * every}" if every else ""
        self.failures.append(cause)
        self.messages.append(
            f"step {step} was not saved in {self.folder}: {cause}. Training continues; the next "
            f"attempt is{at or ' at the next save'}"
        )

    def poll(self) -> list[str]:
        """Messages about saves that finished since the last call. Does not block."""
        return [self.messages.popleft() for _ in range(len(self.messages))]

    def wait(self) -> None:
        """Block until no save is in progress."""
        if self.thread is None:
            return
        began = time.monotonic()
        self.thread.join()
        self.thread = None
        if (waited := time.monotonic() - began) > LONG_WAIT_S:
            self.messages.append(
                f"waited {waited:.1f} s for the previous {self.kind} to be written; "
                f"{self.rarer} avoids the wait"
            )

    def join(self) -> None:
        """Block as `wait` does, but from another thread: the owner still has to call `wait`."""
        if (thread := self.thread) is not None:
            thread.join()

    def check_failures(self) -> None:
        """Raise UserError after `max_failures` consecutive failed saves."""
        limit = self.settings.max_failures
        if limit and len(self.failures) >= limit:
            raise UserError(
                f"[checkpoint] max_failures={limit}: the last {len(self.failures)} saves in "
                f"{self.folder} failed, most recently: {self.failures[-1]}. Fix that or "
                "choose another folder with --checkpoint.dir, then run the same command again."
            )

    def finish(self) -> None:
        """Wait for the last save. Collective; no save may follow.

        Raises Disruption on every rank if the last save failed.
        """
        if self.snapshots:
            self.snapshots.wait()
        self.wait()
        if self.failures:
            newest = self.newest()
            left = f"from {newest}" if newest else "from step 0, because nothing else was saved"
            raise Disruption(
                f"[checkpoint] the last save in {self.folder} failed: {self.failures[-1]}. Fix "
                f"that and run the same command again: it resumes {left}."
            )

    def snapshot_lines(self, num_parameters: int) -> Iterator[str]:
        """Console lines about the snapshots to be taken."""
        if self.snapshots:
            yield from self.snapshots.lines(num_parameters)

    def forget_snapshots_after(self, step: int) -> None:
        """Delete the snapshots of later steps: the run takes them again. Collective."""
        if self.snapshots:
            self.snapshots.forget_after(step)

    def prune(self, record: Mapping[str, Any] | None = None) -> None:
        """Delete checkpoints beyond `keep` and `keep_every`, and files of interrupted saves.

        During a streak of bad steps (in `record`), also keep the rollback target: the newest
        checkpoint before the streak.
        """
        store, whole = store_of(self.folder), self.complete()
        keep, every = self.settings.keep, self.settings.keep_every
        older = whole[:-keep] if keep else []
        stale = [path for path in older if not (every and step_of(path) % every == 0)]
        if streak := ((record or {}).get("guard") or {}).get("streak"):
            good = [path for path in whole if step_of(path) < streak[0]]
            stale = [path for path in stale if path not in good[-1:]]
        if store.renames:
            names = store.names(self.folder)
            left = [n for n in names if n.startswith("step-") and n.endswith(PARTIAL)]
            stale += [self.folder / name for name in left]
        else:
            stale += [path for path in self.folders() if path not in whole]
        for path in stale:
            store.remove(path)


def step_of(path: Location) -> int:
    """Parse the step from a checkpoint's folder name."""
    match = NAME.fullmatch(path.name)
    assert match, path
    return int(match[1])


def raise_later(error: Exception) -> Callable[[], None]:
    """Return a `begin` for `write` that raises `error`."""

    def begin() -> None:
        raise error

    return begin


OF_LIBRARIES = ("config.json", "model_index.json")
"""Files by which a folder of transformers or diffusers is recognised."""
WANTED = "Give a run directory such as outputs/digits, its checkpoints folder, or one checkpoint."


@dataclass(frozen=True)
class NamedRun:
    """The run that a path names, see `resolve`.

    The path is of a run, of its checkpoints folder or of a checkpoint.
    """

    given: Location
    run: Location
    """The run directory; the checkpoints folder if that is elsewhere, by [checkpoint] dir."""
    checkpoints: Checkpoints
    """All checkpoints of the run, `checkpoint` included."""
    checkpoint: Location | None
    """Set if the path names one checkpoint, damaged or not."""

    def folders(self) -> list[Location]:
        """Every checkpoint that the path names, complete or damaged, oldest first."""
        return [self.checkpoint] if self.checkpoint else self.checkpoints.folders()

    def none_found(self, flag: str, what: str = "no checkpoint found") -> UserError:
        """The error for this path. `flag`: its option or key; `what`: what is wrong with it."""
        store = store_of(self.given)
        runs = [
            name
            for name in store.names(self.given)
            if store.has(self.given / name / run_files.CONFIG)
        ]
        if any(store.has(self.given / name) for name in OF_LIBRARIES):
            hint = (
                f"Import weights first: python -m titan_dit convert --input {self.given} --out DIR."
            )
        elif runs and not store.has(self.given / run_files.CONFIG):
            more = ", ..." if len(runs) > 4 else ""
            hint = f"It holds runs ({', '.join(runs[:4])}{more}): give one of them."
        elif isinstance(self.given, Path) and not self.given.exists():
            hint = f"There is no such path. {WANTED}"
        else:
            hint = WANTED
        return UserError(f"{flag} {self.given}: {what}. {hint}")


def resolve(given: Location) -> NamedRun:
    """Find out which of the three a path names. A file in one of them counts as its folder."""
    where = parent(given) if isinstance(given, Path) and given.is_file() else given
    names = store_of(where).names(where)
    if MANIFEST in names or (names and NAME.fullmatch(where.name)):
        folder = parent(where)
        return NamedRun(given, run_of(folder), Checkpoints(folder), where)
    if any(NAME.fullmatch(name) for name in names):
        return NamedRun(given, run_of(where), Checkpoints(where), None)
    checkpoints = Checkpoints(where / run_files.CHECKPOINTS)
    if run_files.CHECKPOINTS not in names and run_files.CONFIG in names and isinstance(where, Path):
        table = config_file.read_toml(where / run_files.CONFIG).get("checkpoint", {})
        if table.get("dir"):
            checkpoints = Checkpoints(location(str(table["dir"])))
    return NamedRun(given, where, checkpoints, None)


def run_of(folder: Location) -> Location:
    """The run directory of a checkpoints folder; the folder itself if its parent is no run."""
    above = parent(folder)
    return above if store_of(above).has(above / run_files.CONFIG) else folder


def parent(where: Location) -> Location:
    """The containing folder, also for "." and ".."."""
    if isinstance(where, Path) and where.name in ("", ".."):
        where = where.resolve()
    return where.parent


def find_checkpoint(given: Location, step: int | None, flag: str = "--run") -> Location:
    """Return a run's checkpoint at `step` (None: the newest), or `given` if it is a checkpoint.

    Raises UserError if there is none, or `given` is a checkpoint of another step.
    """
    named = resolve(given)
    if path := named.checkpoint:
        if step is not None and NAME.fullmatch(path.name) and step_of(path) != step:
            raise UserError(f"--step {step}: {path} is one of step {step_of(path)}. Omit --step.")
        return path
    whole = {step_of(path): path for path in named.checkpoints.complete()}
    if not whole:
        raise named.none_found(flag)
    if step is None:
        return whole[max(whole)]
    if step not in whole:
        have = ", ".join(map(str, whole))
        raise UserError(f"--step {step}: {given} has no checkpoint of this step. It has {have}.")
    return whole[step]
