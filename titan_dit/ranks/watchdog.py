"""The watchdog: a hung rank dumps its stacks and exits, so that the launcher can restart it.

torch's flight recorder adds the last collectives of each rank.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from titan_dit.ranks.failure import HUNG, report

RECORDERS = {"nccl": "_dump_nccl_trace", "gloo": "_dump_fr_trace"}
"""Backend -> private function of torch; not in every build."""


def record_collectives(entries: int = 2000) -> None:
    """Record the last `entries` collectives. Call before init_process_group."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(entries))


def records() -> dict[str, bytes]:
    """Map backend to its pickled record; empty if this build of torch has none."""
    import torch._C

    functions = getattr(torch._C, "_distributed_c10d", None)
    found = {name: getattr(functions, function, None) for name, function in RECORDERS.items()}
    return {name: bytes(dump()) for name, dump in found.items() if dump}


def summary(record: bytes, last: int = 10) -> list[str]:
    """One line for each of the `last` collectives of every group, oldest first.

    Each group has its own: a save in the background does not hide the collectives of the step.
    """
    entries: list[dict[str, Any]] = pickle.loads(record).get("entries", [])
    in_group: Counter[str] = Counter()
    lines = []
    for entry in reversed(entries):
        group = entry["process_group"][0]
        in_group[group] += 1
        if in_group[group] <= last:
            state = "done" if entry["retired"] else entry["state"]
            what = f"{entry['profiling_name']} of {entry['input_sizes']}"
            lines.append(f"#{entry['collective_seq_id']} {what} in group {group}: {state}")
    return lines[::-1]


SLOW_S = 1800.0
"""Minimum timeout of loading, saving, sampling and the first step, which may compile."""
SETTLE_S = 3.0
"""Ranks hang together: wait this long for the other ranks' dumps."""
LAST_RESORT_S = 60.0
"""Extra time before faulthandler's C thread exits the process, if native code holds the GIL."""


class Watchdog:
    """Within the block, call `alive` at least every `timeout_s`; 0 disables the watchdog.

    It has the process groups wait longer than itself, by `set_timeouts(seconds)`: it reports the
    stacks, where NCCL just ends the process.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        timeout_s: float,
        set_timeouts: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self.folder, self.rank, self.timeout_s = folder / "hangs", rank, timeout_s
        self.ended = threading.Event()
        self.is_watching = False
        """True within the block. Outside it nothing would disarm faulthandler."""
        self.rearmed = 0.0
        self.step, self.doing = 0, "starting"
        self.moment, self.allowance = time.monotonic(), max(timeout_s, SLOW_S)
        self.set_timeouts, self.has_stepped = set_timeouts, False

    @property
    def patience_s(self) -> float:
        """Longer than any rank may be slow at any time, such as while others wait for its save."""
        return max(self.timeout_s, SLOW_S) + 2 * LAST_RESORT_S

    def __enter__(self) -> Watchdog:
        """Start the watchdog thread."""
        self.set_timeouts(2 * self.patience_s)
        if self.timeout_s:
            self.is_watching = True
            self.expect("starting", max(self.timeout_s, SLOW_S))
            threading.Thread(target=self.watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the watchdog."""
        self.ended.set()
        if self.is_watching:
            self.is_watching = False
            faulthandler.cancel_dump_traceback_later()

    def alive(self, step: int) -> None:
        """Report a finished step and restart the timeout."""
        if not self.has_stepped:
            self.set_timeouts(self.patience_s)
            self.has_stepped = True
        self.step = step
        self.expect("in the next step", self.timeout_s)

    @contextmanager
    def slow(self, doing: str) -> Iterator[Callable[[], None]]:
        """Allow more time within the block, for work such as "saving" or "drawing".

        Yields a function that restarts the timeout, to be called between slow parts.
        """
        before, allowance = (self.doing, self.allowance), max(self.timeout_s, SLOW_S)
        self.expect(doing, allowance)
        yield lambda: self.expect(doing, allowance)
        self.expect(*before)

    def expect(self, doing: str, allowance: float) -> None:
        """Restart the timeout at `allowance` seconds; the report of a hang names `doing`."""
        self.doing, self.allowance, self.moment = doing, allowance, time.monotonic()
        # Re-arming costs 0.1 ms: skip it on short steps, but not if the allowance grows beyond the
        # armed time.
        if self.is_watching and (self.moment - self.rearmed > 5 or allowance > self.timeout_s):
            self.rearmed = self.moment
            after = allowance + LAST_RESORT_S
            faulthandler.dump_traceback_later(after, exit=True, file=2)

    def watch(self) -> None:
        """Thread: check the timeout until the block or the process ends."""
        while not self.ended.wait(min(1.0, self.timeout_s / 4)):
            silent = time.monotonic() - self.moment
            if silent > self.allowance:
                self.end(silent)

    def end(self, silent: float) -> None:
        """Dump the stacks, report the hang, exit."""
        # In another thread, because the disk may be the cause.
        dump = threading.Thread(target=self.dump, args=(silent,), daemon=True)
        dump.start()
        dump.join(10)
        report(
            f"rank {self.rank} hung: {silent:.0f} s without progress "
            f"([faults] step_timeout_s={self.timeout_s:g}), {self.doing} after step {self.step}. "
            f"The stacks and the last collectives of all ranks are in {self.folder}.",
            is_user_error=False,
        )
        time.sleep(SETTLE_S)
        os._exit(HUNG)

    def dump(self, silent: float) -> None:
        """Write the stacks of all threads and the last collectives to `hangs/`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"step-{self.step:08d}-rank-{self.rank}.txt"
        with path.open("w") as file:
            file.write(f"rank {self.rank}: {silent:.0f} s, {self.doing}, step {self.step} done\n\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
            for backend, record in records().items():
                path.with_suffix(f".{backend}.pickle").write_bytes(record)
                lines = "\n".join(summary(record)) or "none"
                file.write(f"\nlast collectives, {backend}:\n{lines}\n")
                file.flush()
