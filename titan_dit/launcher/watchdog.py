"""A rank that takes no step says where it stands and ends, so that the run can start again."""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from titan_dit.launcher import flight_recorder
from titan_dit.launcher.failure import HUNG, report

SLOW_S = 1800.0
"""Allowance of what is no step, and of the first one (it may compile): at least this long."""
SETTLE_S = 3.0
"""The ranks stand still together: each leaves the others this long for their dumps."""
LAST_RESORT_S = 60.0
"""After the allowance: where native code keeps Python's lock, a thread of C ends the process."""


class Watchdog:
    """Within the block, `alive` must be called at least every `timeout_s`; 0 never ends a run."""

    def __init__(self, folder: Path, rank: int, timeout_s: float) -> None:
        self.folder, self.rank, self.timeout_s = folder / "hangs", rank, timeout_s
        self.ended = threading.Event()
        self.rearmed = 0.0
        self.step, self.doing = 0, "starting"
        self.moment, self.allowance = time.monotonic(), max(timeout_s, SLOW_S)

    def __enter__(self) -> Watchdog:
        """Begin to watch."""
        if self.timeout_s:
            self.expect("starting", max(self.timeout_s, SLOW_S))
            threading.Thread(target=self.watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """No longer."""
        self.ended.set()
        if self.timeout_s:
            faulthandler.cancel_dump_traceback_later()

    def alive(self, step: int) -> None:
        """A step has been taken; the next one is waited for."""
        self.step = step
        self.expect("in the next step", self.timeout_s)

    @contextmanager
    def slow(self, doing: str) -> Iterator[Callable[[], None]]:
        """What may take longer than a step: "saving", "drawing".

        Gives a function for a block of several slow parts, to be called after each.
        """
        before, allowance = (self.doing, self.allowance), max(self.timeout_s, SLOW_S)
        self.expect(doing, allowance)
        yield lambda: self.expect(doing, allowance)
        self.expect(*before)

    def expect(self, doing: str, allowance: float) -> None:
        """Start the clock anew."""
        self.doing, self.allowance, self.moment = doing, allowance, time.monotonic()
        # Starting a thread of C costs 0.1 ms: not for every short step, but whenever more time is
        # given than the armed one would leave.
        if self.timeout_s and (self.moment - self.rearmed > 5 or allowance > self.timeout_s):
            self.rearmed = self.moment
            after = allowance + LAST_RESORT_S
            faulthandler.dump_traceback_later(after, exit=True, file=2)

    def watch(self) -> None:
        """In a thread of its own, until the block or the process ends."""
        while not self.ended.wait(min(1.0, self.timeout_s / 4)):
            silent = time.monotonic() - self.moment
            if silent > self.allowance:
                self.end(silent)

    def end(self, silent: float) -> None:
        """Dump, tell the person once, end the process."""
        # In another thread: the disk may be what hangs.
        dump = threading.Thread(target=self.dump, args=(silent,), daemon=True)
        dump.start()
        dump.join(10)
        report(
            f"rank {self.rank} hung: {silent:.0f} s without a sign of life "
            f"([faults] step_timeout_s={self.timeout_s:g}), {self.doing} after step {self.step}. "
            f"The stacks of all ranks and their last collectives are in {self.folder}.",
            is_user_error=False,
        )
        time.sleep(SETTLE_S)
        os._exit(HUNG)

    def dump(self, silent: float) -> None:
        """The stacks of all threads and the last collectives, in `hangs/`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"step-{self.step:08d}-rank-{self.rank}.txt"
        with path.open("w") as file:
            file.write(f"rank {self.rank}: {silent:.0f} s, {self.doing}, step {self.step} done\n\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
            for backend, record in flight_recorder.records().items():
                path.with_suffix(f".{backend}.pickle").write_bytes(record)
                lines = "\n".join(flight_recorder.summary(record)) or "none"
                file.write(f"\nlast collectives, {backend}:\n{lines}\n")
                file.flush()
