"""Runs measurements in order of importance within a time budget."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from meter import Meter

from titan_dit.config.section import UserError

Row = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One measurement."""

    key: Row
    """Key columns of its row."""
    estimate_s: float
    take: Callable[[], Row]
    keeps_time: bool = False
    """True if it limits itself to `estimate_s` on any device."""

    def __str__(self) -> str:
        """Name in progress lines."""
        return " ".join(str(value) for value in self.key.values())


@dataclass
class Clock:
    """The time budget, and the pace of the device."""

    budget_s: float
    began: float
    """`time.monotonic()` at the start of the program."""
    spent_s: float = 0.0
    estimated_s: float = 0.0
    """Seconds that finished measurements took, and their estimates."""

    @property
    def now_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.began

    @property
    def left_s(self) -> float:
        """Seconds until the budget ends."""
        return self.budget_s - self.now_s

    @property
    def pace(self) -> float:
        """Measured over estimated seconds; depends on device and compiler cache."""
        # A prior of ten seconds at pace 1 damps an outlier in the first measurement.
        return min(4.0, max(0.25, (self.spent_s + 10) / (self.estimated_s + 10)))

    def expected_s(self, job: Job) -> float:
        """Expected seconds of a job."""
        return job.estimate_s if job.keeps_time else job.estimate_s * self.pace

    def book(self, estimate_s: float, taken_s: float) -> None:
        """Record a finished measurement."""
        self.spent_s, self.estimated_s = self.spent_s + taken_s, self.estimated_s + estimate_s


def attempt(take: Callable[[], Row], meter: Meter) -> Row:
    """Release the device, then return the measured row, or one with the error."""
    try:
        # Reset compiled code, too: a second shape would be compiled as dynamic.
        torch.compiler.reset()
        meter.release()
        return {"result": "measured", **take()}
    except UserError as error:
        return {"result": f"not measured: {error}"}
    except Exception as error:
        # The compiler wraps the allocator's error in its own.
        if "out of memory" in str(error).lower():
            return {"result": "out of memory"}
        traceback.print_exc(file=sys.stderr)
        return {"result": f"failed: {type(error).__name__}", "error": str(error)[:1000]}


def work_off(
    jobs: Sequence[Job], meter: Meter, clock: Clock, say: Callable[[str], None]
) -> Iterator[tuple[Job, Row]]:
    """Yield every row when it is done; "not begun" if the job would exceed the budget.

    A shorter, less important job may still run after a skipped one.
    """
    for number, job in enumerate(jobs):
        expected = clock.expected_s(job)
        if expected > clock.left_s:
            yield job, {**job.key, "result": "not begun"}
            continue
        rest = sum(map(clock.expected_s, jobs[number:]))
        say(
            f"[{clock.now_s:4.0f} s, {clock.left_s:.0f} left] {number + 1}/{len(jobs)} {job}: "
            f"about {expected:.0f} s, all remaining jobs {rest:.0f}"
        )
        began = time.monotonic()
        row = attempt(job.take, meter)
        taken = time.monotonic() - began
        if row["result"] == "measured" and not job.keeps_time:
            clock.book(job.estimate_s, taken)
        yield job, {**job.key, **row, "took_s": round(taken, 1)}
