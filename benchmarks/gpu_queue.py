"""Measurements in the order of their importance, as many as a time budget holds."""

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
    """What tells its row from others."""
    estimate_s: float
    take: Callable[[], Row]
    keeps_time: bool = False
    """Whether it ends by itself after so many seconds, however slow the device is."""

    def __str__(self) -> str:
        """For progress lines."""
        return " ".join(str(value) for value in self.key.values())


@dataclass
class Clock:
    """What is left of the budget."""

    budget_s: float
    began: float
    """`time.monotonic()` at the start of the program."""
    spent_s: float = 0.0
    estimated_s: float = 0.0
    """Of the measurements that are done: what they took, and what had been expected."""

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
        """Seconds taken per second expected: a slower device, a compiler's cache that is warm."""
        # Ten seconds as expected weigh against a first measurement that is a mere outlier.
        return min(4.0, max(0.25, (self.spent_s + 10) / (self.estimated_s + 10)))

    def expected_s(self, job: Job) -> float:
        """Seconds that a job will take."""
        return job.estimate_s if job.keeps_time else job.estimate_s * self.pace

    def book(self, estimate_s: float, taken_s: float) -> None:
        """One is done."""
        self.spent_s, self.estimated_s = self.spent_s + taken_s, self.estimated_s + estimate_s


def attempt(take: Callable[[], Row], meter: Meter) -> Row:
    """A row in any case: what was measured, or why nothing was; on an otherwise empty device."""
    try:
        # Compiled code of the last one goes too: a second shape would be compiled as dynamic.
        torch.compiler.reset()
        meter.release()
        return {"result": "measured", **take()}
    except UserError as error:
        return {"result": f"not measured: {error}"}
    except Exception as error:
        # The compiler wraps the error of the allocator in one of its own.
        if "out of memory" in str(error).lower():
            return {"result": "out of memory"}
        traceback.print_exc(file=sys.stderr)
        return {"result": f"failed: {type(error).__name__}", "error": str(error)[:1000]}


def work_off(
    jobs: Sequence[Job], meter: Meter, clock: Clock, say: Callable[[str], None]
) -> Iterator[tuple[Job, Row]]:
    """Every row as soon as it is there; "not begun" where one would not end within the budget.

    A job of less importance may still fit where a longer one did not.
    """
    for number, job in enumerate(jobs):
        expected = clock.expected_s(job)
        if expected > clock.left_s:
            yield job, {**job.key, "result": "not begun"}
            continue
        rest = sum(map(clock.expected_s, jobs[number:]))
        say(
            f"[{clock.now_s:4.0f} s, {clock.left_s:.0f} left] {number + 1}/{len(jobs)} {job}: "
            f"about {expected:.0f} s, all that is left {rest:.0f}"
        )
        began = time.monotonic()
        row = attempt(job.take, meter)
        taken = time.monotonic() - began
        if row["result"] == "measured" and not job.keeps_time:
            clock.book(job.estimate_s, taken)
        yield job, {**job.key, **row, "took_s": round(taken, 1)}
