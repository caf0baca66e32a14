"""Bad steps: detected, skipped and counted; the loss scale of fp16.

RUN/faults.jsonl has a line for each bad step and each rollback. resume.py rolls back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titan_dit.config import schema, user_text
from titan_dit.config.layout import MAX_LOSS_SCALE, PrecisionConfig
from titan_dit.config.operation import FaultsConfig
from titan_dit.config.schema import Maybe
from titan_dit.config.section import Finite
from titan_dit.data.order import STEP_RANGES, ranges_of
from titan_dit.objectives.base import Objective
from titan_dit.rng import SampleRNG
from titan_dit.system import run_files

DECAY = 0.99
"""Decay of the gradient norm's running average, after the first 1 / (1 - DECAY) good steps."""
MAX_UNREAD = 100
"""Maximum number of unread verdicts on the device if max_consecutive_bad_steps is 0."""
SMOOTHING = 50
"""Window of the smoothed loss in good steps, but at most a quarter of those so far."""


@dataclass(frozen=True)
class UnreadStep:
    """A step whose verdict is still on the device."""

    step: int
    cursor: int
    """The cursor before the step."""
    loss: Tensor
    """This rank's share of the loss."""
    grad_norm: Tensor
    is_spike: Tensor
    scale_and_overflow: tuple[Tensor, ...]
    """fp16: (loss scale of the step, True if it is an overflow); else empty."""


@dataclass(frozen=True)
class BadStep:
    """A step that changed neither weights nor averages; in fp16 an overflow, too."""

    step: int
    cursor: int
    kind: str
    """nonfinite, spike or overflow."""
    grad_norm: float
    loss: float
    loss_scale: float | None = None
    """fp16: loss scale of the step."""

    def message(self, log: object) -> str:
        """A line for the console; `log` is the file with the details."""
        if self.kind == "overflow":
            why = f"the gradients overflow in fp16 at the loss scale {self.loss_scale:g}"
        else:
            norm = f"a spike of {self.grad_norm:.3g}" if self.kind == "spike" else "not finite"
            why = f"the gradient norm is {norm}"
        return f"step {self.step} skipped: {why} (see {log})"


@dataclass(frozen=True)
class Reading:
    """Result of a read: the last step's loss and norm, and all bad steps since the last read."""

    loss: float
    smooth_loss: float
    """Running mean over the good steps; NaN before the first one."""
    grad_norm: float
    bad: tuple[BadStep, ...]


class Guard:
    """Checks every step; the verdict is equal on all ranks because its inputs are."""

    def __init__(
        self, config: FaultsConfig, device: torch.device, precision: PrecisionConfig | None = None
    ) -> None:
        self.config = config
        self.scaler = LossScale.of(precision, device) if precision else None
        # Running average of the norm over the good steps; updated only if spike_ratio is set.
        self.average = torch.zeros((), device=device)
        self.num_good = torch.zeros((), device=device)
        self.no_spike = torch.zeros((), dtype=torch.bool, device=device)
        self.unread: list[UnreadStep] = []
        # Values at the last read.
        self.nan_steps = self.spike_steps = self.overflow_steps = self.num_consecutive = 0
        self.last_scale: float | None = None
        self.smooth_loss, self.num_losses = math.nan, 0
        self.streak: tuple[int, int] | None = None
        """(step, cursor) of the first step of the current streak of bad steps."""
        self.streak_end: tuple[int, int] | None = None
        """(step, cursor) of the step at which the streak reached max_consecutive_bad_steps."""

    @property
    def every(self) -> int:
        """Maximum steps between reads, so that a streak is detected in time."""
        return self.config.max_consecutive_bad_steps or MAX_UNREAD

    @property
    def loss_scale(self) -> Tensor | None:
        """The loss scale of the next step, a scalar on the device; None unless in fp16."""
        return self.scaler.value if self.scaler else None

    @property
    def counters(self) -> dict[str, float | None]:
        """Columns of the metrics, as of the last read."""
        skipped = self.nan_steps + self.spike_steps + self.overflow_steps
        found: dict[str, float | None] = {"skipped_steps": skipped, "nan_steps": self.nan_steps}
        if self.scaler:
            found |= {"overflow_steps": self.overflow_steps, "loss_scale": self.last_scale}
        return found

    def check(self, step: int, cursor: int, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """Return True if the step is bad, as a scalar on the device; no synchronisation."""
        is_spike = self.no_spike
        # Two operators: x - x is NaN if x is not finite.
        bad = grad_norm - grad_norm != 0
        scale_and_overflow: tuple[Tensor, ...] = ()
        if self.scaler:
            scale_and_overflow = self.scaler.value, self.scaler.update(grad_norm)
            bad = bad | scale_and_overflow[1]
        if self.config.spike_ratio:
            known = self.num_good >= self.config.spike_after
            limit = self.config.spike_ratio * self.average
            is_spike = known & ~bad & (grad_norm > limit)
            bad = bad | is_spike
            self.num_good = self.num_good + ~bad
            # A plain mean at first, to avoid a bias towards the initial 0.
            share = (1 / self.num_good.clamp(min=1)).clamp(min=1 - DECAY)
            moved = torch.lerp(self.average, grad_norm, share)
            self.average = torch.where(bad, self.average, moved)
        taken = UnreadStep(step, cursor, loss.detach(), grad_norm, is_spike, scale_and_overflow)
        self.unread.append(taken)
        return bad

    def read(self, sum_loss: Callable[[Tensor], Tensor]) -> Reading:
        """Read the verdicts since the last read; synchronises the device. Collective.

        Counting stops at max_consecutive_bad_steps, so the rollback does not depend on the interval
        between reads. `sum_loss` all-reduces the ranks' loss shares. Needs an unread step.
        """
        taken, self.unread = self.unread, []
        verdicts = [step.grad_norm for step in taken] + [step.is_spike.float() for step in taken]
        for of_steps in zip(*(step.scale_and_overflow for step in taken), strict=True):
            verdicts += [value.float() for value in of_steps]
        losses = sum_loss(torch.stack([step.loss for step in taken]))
        # Reduced again alone: the order of the sum over ranks depends on the place in a vector.
        loss = sum_loss(taken[-1].loss)
        *values, last = torch.stack([*verdicts, *losses.unbind(), loss]).tolist()
        rows = [values[first : first + len(taken)] for first in range(0, len(values), len(taken))]
        bad = []
        for step, norm, is_spike, *scale_and_overflow, its_loss in zip(taken, *rows, strict=True):
            self.last_scale, overflows = scale_and_overflow or (None, False)
            kind = "spike" if is_spike else "good" if math.isfinite(norm) else "nonfinite"
            kind = "overflow" if overflows else kind
            self.count(step, kind)
            if kind == "good":
                self.smooth(its_loss)
            else:
                bad.append(BadStep(step.step, step.cursor, kind, norm, its_loss, self.last_scale))
            if self.streak_end:
                break
        return Reading(last, self.smooth_loss, rows[0][-1], tuple(bad))

    def smooth(self, loss: float) -> None:
        """Add a good step's loss to the smoothed loss."""
        self.num_losses += 1
        if self.num_losses == 1:
            self.smooth_loss = loss
        # A short window at first: the loss falls fastest then.
        window = min(math.ceil(self.num_losses / 4), SMOOTHING)
        self.smooth_loss += (loss - self.smooth_loss) / window

    def count(self, step: UnreadStep, kind: str) -> None:
        """Update counters and streak with a step's verdict."""
        if kind == "good":
            self.num_consecutive, self.streak = 0, None
            return
        if kind == "overflow":  # It neither begins nor ends a streak.
            self.overflow_steps += 1
            return
        self.nan_steps += kind == "nonfinite"
        self.spike_steps += kind == "spike"
        self.num_consecutive += 1
        here = step.step, step.cursor
        self.streak = self.streak or here
        if 0 < self.config.max_consecutive_bad_steps <= self.num_consecutive:
            self.streak_end = here

    @property
    def to_undo(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """(step, cursor before it) of the first and of the last bad step that a rollback undoes."""
        assert self.streak
        assert self.streak_end
        return self.streak, self.streak_end

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint, as of the last read; synchronises the device."""
        assert not self.unread, "a checkpoint with unread verdicts"
        assert not self.streak_end, "a checkpoint of steps to be rolled back"
        scale = {"loss_scale": self.scaler.state()} if self.scaler else {}
        return scale | {
            "nan_steps": self.nan_steps,
            "spike_steps": self.spike_steps,
            "overflow_steps": self.overflow_steps,
            "in_a_row": self.num_consecutive,
            "streak": self.streak,
            "average": self.average.item(),
            "num_good": round(self.num_good.item()),
            "smooth_loss": self.smooth_loss if self.num_losses else None,
            "num_losses": self.num_losses,
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Load the values of `state`; old checkpoints lack some, the oldest all but `nan_steps`."""
        self.unread, self.streak_end = [], None
        self.nan_steps = saved["nan_steps"]
        self.spike_steps = saved.get("spike_steps", 0)
        self.overflow_steps = saved.get("overflow_steps", 0)
        self.num_consecutive = saved.get("in_a_row", 0)
        first = saved.get("streak")
        self.streak = (first[0], first[1]) if first else None
        self.average.fill_(saved.get("average", 0.0))
        self.num_good.fill_(saved.get("num_good", 0))
        smooth_loss = saved.get("smooth_loss")
        self.num_losses = 0 if smooth_loss is None else saved.get("num_losses", 0)
        self.smooth_loss = math.nan if smooth_loss is None else smooth_loss
        if self.scaler:
            self.scaler.load(saved.get("loss_scale"))


LARGEST_NORM = 65504.0
"""The largest number in fp16: a greater norm of the scaled gradients is an overflow, too.

Which sums are in fp16 depends on the layout, and so does which of them overflow. Below this norm no
summed gradient does; above it every layout skips the step."""


class LossScale:
    """The loss scale of [precision] dtype = "fp16": a factor on the loss's gradient.

    fp16 holds no value below 6e-8: small gradients would become 0. With the factor they do not, and
    clipping divides by it (`clip_norm`). If it is too large, gradients become infinite: the step is
    skipped and the factor halved, so that it stays near the largest possible one (arXiv:1710.03740
    sec. 3.2). The rule is Megatron-LM's, except for LARGEST_NORM. A scalar on the device, equal on
    all ranks: it follows from the global gradient norms.
    """

    def __init__(self, config: PrecisionConfig, device: torch.device) -> None:
        self.config = config
        self.least = config.loss_scale or config.loss_scale_min
        """Minimum scale, at which a norm that is not finite is a bad step, not an overflow."""
        start = config.loss_scale or config.loss_scale_init
        # Replaced by each update, never changed in place: the guard's unread steps refer to them.
        self.value = torch.full((), start, dtype=torch.float32, device=device)
        self.num_without_overflow = torch.zeros((), device=device)
        """Steps since the last overflow or the last doubling of the scale."""
        self.tolerated = torch.full((), self.num_tolerated, device=device)
        """Remaining overflows that do not halve the scale; reset when it doubles."""

    @classmethod
    def of(cls, config: PrecisionConfig, device: torch.device) -> LossScale | None:
        """The loss scale of fp16; None for other formats, which need none."""
        return cls(config, device) if config.dtype == "fp16" else None

    @property
    def num_tolerated(self) -> float:
        """Value of `tolerated` after the scale has doubled: hysteresis - 1."""
        return self.config.loss_scale_hysteresis - 1.0

    def update(self, grad_norm: Tensor) -> Tensor:
        """Adapt to a step's norm of the unscaled gradients; return True if it is an overflow.

        Scalars on the device; no synchronisation. At the minimum scale there are no overflows.
        """
        if self.config.loss_scale:
            return torch.zeros_like(grad_norm, dtype=torch.bool)
        # Not ">": every comparison with NaN is false.
        overflows = ~(grad_norm * self.value <= LARGEST_NORM) & (self.value > self.least)
        self._adapt(overflows | ~grad_norm.isfinite())
        return overflows

    def _adapt(self, fails: Tensor) -> None:
        halves = fails & (self.tolerated <= 0)
        num_without_overflow = torch.where(fails, 0.0, self.num_without_overflow + 1)
        grows = num_without_overflow >= self.config.loss_scale_window
        # 2 to a power of -1, 0 or 1.
        value = self.value * torch.exp2(grows.float() - halves.float())
        self.value = value.clamp(self.least, MAX_LOSS_SCALE)
        self.num_without_overflow = torch.where(grows, 0.0, num_without_overflow)
        left = (self.tolerated - fails.float()).clamp(min=0.0)
        self.tolerated = torch.where(grows, self.num_tolerated, left)

    def state(self) -> dict[str, float]:
        """Plain values for a checkpoint; synchronises the device."""
        return {
            "value": self.value.item(),
            "num_good": self.num_without_overflow.item(),
            "tolerated": self.tolerated.item(),
        }

    def load(self, saved: Mapping[str, Any] | None) -> None:
        """Load the values of `state`; None, from a run that was not in fp16, starts anew."""
        fresh = LossScale(self.config, self.value.device)
        self.value, self.tolerated = fresh.value, fresh.tolerated
        self.num_without_overflow = fresh.num_without_overflow
        if saved and not self.config.loss_scale:
            device = self.value.device
            # The run may resume with another loss_scale_min.
            self.value = torch.full((), max(saved["value"], self.least), device=device)
            self.num_without_overflow = torch.full((), saved["num_good"], device=device)
            self.tolerated = torch.full((), saved["tolerated"], device=device)


LINE = {
    "step": schema.COUNT,
    "kind": str,
    "to_step": Maybe(schema.COUNT),
    "sample_numbers": Maybe(STEP_RANGES),
    "loss_scale": Maybe(Finite),
}
"""Keys of a line that are read."""


def line_of_bad_step(
    bad: BadStep,
    numbers: Sequence[int],
    rows: Sequence[int],
    described: Mapping[str, Sequence[float]],
) -> dict[str, Any]:
    """The line of a bad step; `rows` and `described` have one entry per sample of `numbers`."""
    scale = {} if bad.loss_scale is None else {"loss_scale": bad.loss_scale}
    return {
        "step": bad.step,
        "kind": bad.kind,
        **scale,
        "grad_norm": bad.grad_norm if math.isfinite(bad.grad_norm) else None,
        "loss": bad.loss if math.isfinite(bad.loss) else None,
        "sample_numbers": ranges_of(numbers),
        "rows": list(rows),
        "drawn": {name: list(values) for name, values in described.items()},
    }


def line_of_rollback(step: int, to_step: int, first: int, end: int) -> dict[str, Any]:
    """The line of a rollback from `step` to `to_step` that skips samples `first` to `end` - 1."""
    return {"step": step, "kind": "rollback", "to_step": to_step, "skipped": [first, end]}


def drawn_for(
    objective: Objective, seed: int, numbers: Sequence[int], device: torch.device
) -> dict[str, list[float]]:
    """Reproduce the objective's random draws of these samples, without their data."""
    rng = SampleRNG(seed, torch.tensor(numbers, device=device))
    return {name: values.tolist() for name, values in objective.describe({}, rng).items()}


def read_faults(folder: Path) -> list[dict[str, Any]]:
    """Parse a run's file, without damaged lines. Raises UserError for a line of wrong values."""
    return list(checked_lines(folder / run_files.FAULTS, LINE))


def checked_lines(file: Path, keys: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the checked lines of a run's file; skip lines cut off by a kill or damaged on disk."""
    for number, found in user_text.whole_lines(file):
        schema.check(found, keys, f"{file} line {number}:")
        yield found
