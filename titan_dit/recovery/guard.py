"""Bad numbers: which steps change nothing, and when the run has to go back.

A step is bad if its gradient norm is not finite (a non-finite loss makes it so, see
`LocalExecutor.step`), or a spike: far above its running average. The verdict stays on the device
while the run trains; the host asks for the verdicts of several steps at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from titan_dit.config.operation import FaultsConfig

DECAY = 0.99
"""Of the running average of the gradient norm, once there have been enough steps for it."""
UNREAD = 100
"""Most steps to remember on the device where no key asks to look at them."""


@dataclass(frozen=True)
class Taken:
    """A step whose verdict is still on the device."""

    step: int
    cursor: int
    """Before the step."""
    loss: Tensor
    """This rank's share."""
    grad_norm: Tensor
    is_spike: Tensor


@dataclass(frozen=True)
class BadStep:
    """A step that changed neither weights nor averages."""

    step: int
    cursor: int
    kind: str
    """nonfinite, or spike."""
    grad_norm: float
    loss: float

    def told(self, log: object) -> str:
        """A line for the console; `log` is the file with the details."""
        why = f"a spike of {self.grad_norm:.3g}" if self.kind == "spike" else "not finite"
        return f"step {self.step} skipped: the gradient norm is {why} (see {log})"


@dataclass(frozen=True)
class Reading:
    """What the host has learned: of the last step, and of the bad ones since it last asked."""

    loss: float
    grad_norm: float
    bad: tuple[BadStep, ...]


class Guard:
    """Judges every step, alike on all ranks: all it looks at is equal on them."""

    def __init__(self, config: FaultsConfig, device: torch.device) -> None:
        self.config = config
        # Of the good steps; kept only where spikes are looked for.
        self.average = torch.zeros((), device=device)
        self.num_good = torch.zeros((), device=device)
        self.never = torch.zeros((), dtype=torch.bool, device=device)
        self.taken: list[Taken] = []
        # As of the last reading.
        self.nan_steps = self.spike_steps = self.in_a_row = 0
        self.streak: tuple[int, int] | None = None
        """The step that the present row of bad ones began with, and the cursor before it."""
        self.limit: tuple[int, int] | None = None
        """The step with which that row became too long, and the cursor before it."""

    @property
    def every(self) -> int:
        """Steps between two readings at most, so that a row of bad steps is seen in time."""
        return self.config.max_consecutive_bad_steps or UNREAD

    def check(self, step: int, cursor: int, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """Whether the step is bad: a scalar on the device, for which nothing waits."""
        is_spike = self.never
        if self.config.spike_ratio:
            known = self.num_good >= self.config.spike_after
            limit = self.config.spike_ratio * self.average
            is_spike = known & grad_norm.isfinite() & (grad_norm > limit)
        bad = ~grad_norm.isfinite() | is_spike
        if self.config.spike_ratio:
            self.num_good = self.num_good + ~bad
            # A plain mean at first, so that the average does not begin at 0.
            share = (1 / self.num_good.clamp(min=1)).clamp(min=1 - DECAY)
            moved = torch.lerp(self.average, grad_norm, share)
            self.average = torch.where(bad, self.average, moved)
        self.taken.append(Taken(step, cursor, loss.detach(), grad_norm, is_spike))
        return bad

    def read(self, sum_loss: Callable[[Tensor], Tensor]) -> Reading:
        """The verdicts since the last reading; waits for the device. There must be a step since.

        Once a row of bad steps is too long, later steps do not count: the run has to go back, and
        does the same whenever it is told.

        `sum_loss` adds up the ranks' shares of losses; every rank calls at the same steps.
        """
        taken, self.taken = self.taken, []
        verdicts = [step.grad_norm for step in taken] + [step.is_spike.float() for step in taken]
        *values, loss = torch.stack([*verdicts, sum_loss(taken[-1].loss)]).tolist()
        norms, spikes = values[: len(taken)], values[len(taken) :]
        bad = []
        for step, norm, is_spike in zip(taken, norms, spikes, strict=True):
            kind = "spike" if is_spike else "good" if math.isfinite(norm) else "nonfinite"
            self.count(step, kind)
            if kind != "good":
                bad.append((step, kind, norm))
            if self.limit:
                break
        # Every rank has found the same ones, so that all of them ask, or none.
        losses = sum_loss(torch.stack([step.loss for step, _, _ in bad])).tolist() if bad else []
        found = [
            BadStep(step.step, step.cursor, kind, norm, its_loss)
            for (step, kind, norm), its_loss in zip(bad, losses, strict=True)
        ]
        return Reading(loss, norms[-1], tuple(found))

    def count(self, step: Taken, kind: str) -> None:
        """Add a step's verdict to the numbers."""
        if kind == "good":
            self.in_a_row, self.streak = 0, None
            return
        self.nan_steps += kind == "nonfinite"
        self.spike_steps += kind == "spike"
        self.in_a_row += 1
        here = step.step, step.cursor
        self.streak = self.streak or here
        if 0 < self.config.max_consecutive_bad_steps <= self.in_a_row:
            self.limit = here

    @property
    def to_undo(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """(step, cursor before it) of the first and of the last of too many bad steps in a row."""
        assert self.streak
        assert self.limit
        return self.streak, self.limit

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint, of the steps up to the last reading; waits."""
        assert not self.taken, "a checkpoint without the verdict on its own steps"
        assert not self.limit, "a checkpoint of what has to be undone"
        return {
            "nan_steps": self.nan_steps,
            "spike_steps": self.spike_steps,
            "in_a_row": self.in_a_row,
            "streak": self.streak,
            "average": self.average.item(),
            "num_good": round(self.num_good.item()),
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Go on from the values of `state`; where there was no guard yet, `nan_steps` is alone."""
        self.taken, self.limit = [], None
        self.nan_steps = saved["nan_steps"]
        self.spike_steps = saved.get("spike_steps", 0)
        self.in_a_row = saved.get("in_a_row", 0)
        first = saved.get("streak")
        self.streak = (first[0], first[1]) if first else None
        self.average.fill_(saved.get("average", 0.0))
        self.num_good.fill_(saved.get("num_good", 0))
