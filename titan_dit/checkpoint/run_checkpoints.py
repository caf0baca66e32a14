"""The checkpoints of one run: when they are written, what is kept, and what happens on failure.

The copy of the state is the step's business, writing it a thread's. Nothing that goes wrong there
ends training by itself: it is told, tried again at the next interval, and ends the run only after
`[checkpoint] max_failures` in a row, on all ranks at the same point.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from titan_dit.checkpoint.checkpoint import write
from titan_dit.checkpoint.staging import Staging, Tensors
from titan_dit.checkpoint.store import MANIFEST, Place, store_of
from titan_dit.config.operation import CheckpointConfig
from titan_dit.config.section import UserError
from titan_dit.launcher.failure import Disruption
from titan_dit.launcher.ranks import Failed, Ranks
from titan_dit.system.files import PARTIAL

NAME = re.compile(r"step-(\d{8,})")
LONG_S = 1.0
"""A wait for the checkpoint before that is worth telling."""


class Checkpoints:
    """`step-00000100`, `step-00000200`, ... in one folder; one of them being written at most."""

    def __init__(self, folder: Place, settings: CheckpointConfig | None = None) -> None:
        self.folder = folder
        self.settings = settings or CheckpointConfig()
        self.staging = Staging()
        self.ranks: Ranks | None = None
        self.thread: threading.Thread | None = None
        self.said: deque[str] = deque()
        self.failures: list[str] = []
        """Why the saves since the last good one have failed."""

    def named(self) -> list[Place]:
        """Every folder with the name of a checkpoint, whole or damaged, oldest first."""
        names = [name for name in store_of(self.folder).names(self.folder) if NAME.fullmatch(name)]
        return sorted((self.folder / name for name in names), key=step_of)

    def whole(self) -> list[Place]:
        """Every checkpoint that was finished, oldest first."""
        store = store_of(self.folder)
        return [path for path in self.named() if store.has(path / MANIFEST)]

    def newest(self) -> Place | None:
        """The finished checkpoint of the highest step, if there is one."""
        return next(reversed(self.whole()), None)

    def save(self, step: int, tensors: Tensors, record: Mapping[str, Any]) -> Place:
        """Write the checkpoint of `step`; every rank calls. Where it will be, once it is whole.

        `record` holds plain values: step, cursor, counters, config. Returns when `tensors` may
        change again; `poll` tells how it ended. Raises UserError, on every rank, where the saves
        before have failed too often.
        """
        self.wait()
        self.give_up()
        self.ranks = self.ranks or Ranks.of_their_own()
        path = self.folder / f"step-{step:08d}"
        if not self.settings.async_save:
            self.write(step, path, tensors, record)
            return path
        begin = None
        try:
            tensors = self.staging.copy(tensors)
        except (RuntimeError, MemoryError) as error:  # To be told to the others, which will write.
            begin = raising(error)
        arguments = (step, path, tensors, record, begin)
        # A daemon: an error elsewhere ends the process without waiting for it.
        self.thread = threading.Thread(target=self.write_beside, args=arguments, daemon=True)
        self.thread.start()
        return path

    def write_beside(self, step: int, *arguments: Any) -> None:
        """`write` in a thread, where nothing may be raised."""
        try:
            self.write(step, *arguments)
        except Exception as error:  # Another rank is gone: the next step will say so.
            assert self.ranks
            self.failed(step, self.ranks.describe(error))

    def write(
        self,
        step: int,
        path: Place,
        tensors: Tensors,
        record: Mapping[str, Any],
        begin: Callable[[], None] | None = None,
    ) -> None:
        """Write it, and remember how it ended."""
        assert self.ranks
        try:
            write(path, tensors, record, self.ranks, begin)
        except Failed as error:
            self.failed(step, str(error))
            return
        self.failures.clear()
        self.said.append(f"saved {path}")
        if self.ranks.is_first:
            with contextlib.suppress(Exception):
                self.prune(record)

    def failed(self, step: int, cause: str) -> None:
        """Remember a save that came to nothing."""
        every = self.settings.every
        at = f" at step {(step // every + 1) * every}" if every else ""
        self.failures.append(cause)
        self.said.append(
            f"step {step} was not saved in {self.folder}: {cause}. Training goes on; the next "
            f"attempt is{at or ' at the next save'}"
        )

    def poll(self) -> list[str]:
        """What is to be said of saves that have ended since the last call. Never waits."""
        return [self.said.popleft() for _ in range(len(self.said))]

    def wait(self) -> None:
        """Until nothing is being written."""
        if self.thread is None:
            return
        began = time.monotonic()
        self.thread.join()
        self.thread = None
        if (waited := time.monotonic() - began) > LONG_S:
            self.said.append(
                f"waited {waited:.1f} s for a checkpoint to be written; a larger [checkpoint] "
                "every would not"
            )

    def give_up(self) -> None:
        """Raise where too many saves in a row have failed."""
        limit = self.settings.max_failures
        if limit and len(self.failures) >= limit:
            raise UserError(
                f"[checkpoint] max_failures={limit}: the last {len(self.failures)} saves in "
                f"{self.folder} failed, the last one with: {self.failures[-1]}. Mend that, or "
                "choose another folder with --checkpoint.dir, and run the same command again."
            )

    def finish(self) -> None:
        """Wait for what is being written; every rank calls, when there will be no further save.

        Raises Disruption, on every rank, where the last save has failed.
        """
        self.wait()
        if self.failures:
            newest = self.newest()
            left = f"from {newest}" if newest else "from the start, as nothing else was saved"
            raise Disruption(
                f"[checkpoint] the last save in {self.folder} failed: {self.failures[-1]}. Mend "
                f"that and run the same command again: it goes on {left}."
            )

    def prune(self, record: Mapping[str, Any] | None = None) -> None:
        """Delete what need not be kept, and what interrupted saves have left.

        Kept as well: where the run goes back to if the row of bad steps that `record` tells of goes
        on.
        """
        store, whole = store_of(self.folder), self.whole()
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
            stale += [path for path in self.named() if path not in whole]
        for path in stale:
            store.remove(path)


def step_of(path: Place) -> int:
    """The step in a checkpoint's name."""
    match = NAME.fullmatch(path.name)
    assert match, path
    return int(match[1])


def raising(error: Exception) -> Callable[[], None]:
    """A reason not to begin."""

    def begin() -> None:
        raise error

    return begin
