"""Runs measurements in order of importance within a time budget."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from meter import Meter

from titan_dit.config.section import UserError

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Task:
    """A measurement in the queue."""

    key: Row
    """Key columns of its row."""
    estimate_s: float
    keeps_time: bool = False
    """True if it limits itself to `estimate_s` on any device."""
    environment: Mapping[str, str | None] = field(default_factory=dict)
    """Environment variables of its process; None unsets one."""

    def __str__(self) -> str:
        """Name in progress lines."""
        return " ".join(str(value) for value in self.key.values())


@dataclass(frozen=True, kw_only=True)
class Job(Task):
    """A measurement."""

    take: Callable[[], Row]

    @property
    def task(self) -> Task:
        """Without the function, to be sent to another process."""
        return Task(
            key=self.key,
            estimate_s=self.estimate_s,
            keeps_time=self.keeps_time,
            environment=self.environment,
        )


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

    def expected_s(self, task: Task) -> float:
        """Expected seconds of a measurement."""
        return task.estimate_s if task.keeps_time else task.estimate_s * self.pace

    def book(self, estimate_s: float, taken_s: float) -> None:
        """Record a finished measurement."""
        self.spent_s, self.estimated_s = self.spent_s + taken_s, self.estimated_s + estimate_s


PATIENCE = 4
"""A row hangs if it takes this many times what is expected, and longer than the least limit."""


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


Measure = Callable[[Task, float, float], Row]
"""(task, seconds after which it hangs, seconds left of the budget) -> the row."""


def work_off(
    tasks: Sequence[Task],
    measure: Measure,
    clock: Clock,
    say: Callable[[str], None],
    least_limit_s: float = 60.0,
) -> Iterator[tuple[Task, Row]]:
    """Yield every row when it is done; "not begun" if the task would exceed the budget.

    A shorter, less important task may still run after a skipped one.
    """
    for number, task in enumerate(tasks):
        expected = clock.expected_s(task)
        if expected > clock.left_s:
            yield task, {**task.key, "result": "not begun"}
            continue
        rest = sum(map(clock.expected_s, tasks[number:]))
        say(
            f"[{clock.now_s:4.0f} s, {clock.left_s:.0f} left] {number + 1}/{len(tasks)} {task}: "
            f"about {expected:.0f} s, all remaining rows {rest:.0f}"
        )
        began = time.monotonic()
        row = measure(task, max(least_limit_s, PATIENCE * expected), clock.left_s)
        taken = time.monotonic() - began
        if row["result"] == "measured" and not task.keeps_time:
            clock.book(task.estimate_s, taken)
        yield task, {**task.key, **row, "took_s": round(taken, 1)}
