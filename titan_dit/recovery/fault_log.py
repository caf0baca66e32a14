"""RUN/faults.jsonl: one line per bad step and per rollback.

The file is append-only. A step that was repeated after a resume has two lines; the last one counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from titan_dit.config import schema, user_text
from titan_dit.config.schema import Maybe
from titan_dit.config.section import Finite
from titan_dit.data.sample_ranges import OF_STEP, ranges_of
from titan_dit.objectives.base import Objective
from titan_dit.recovery.guard import BadStep
from titan_dit.rng import SampleRNG

FILE = "faults.jsonl"
LINE = {
    "step": schema.COUNT,
    "kind": str,
    "to_step": Maybe(schema.COUNT),
    "sample_numbers": Maybe(OF_STEP),
    "loss_scale": Maybe(Finite),
}
"""Keys of a line that are read."""


def bad_step(
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


def rollback(step: int, to_step: int, first: int, end: int) -> dict[str, Any]:
    """The line of a rollback from `step` to `to_step` that skips samples `first` to `end` - 1."""
    return {"step": step, "kind": "rollback", "to_step": to_step, "skipped": [first, end]}


def drawn_for(
    objective: Objective, seed: int, numbers: Sequence[int], device: torch.device
) -> dict[str, list[float]]:
    """Reproduce the objective's random draws of these samples, without their data."""
    rng = SampleRNG(seed, torch.tensor(numbers, device=device))
    return {name: values.tolist() for name, values in objective.describe({}, rng).items()}


def read(folder: Path) -> list[dict[str, Any]]:
    """Parse a run's file, without damaged lines. Raises UserError for a line of wrong values."""
    return list(whole_lines(folder / FILE, LINE))


def whole_lines(file: Path, keys: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the checked lines of a run's file; skip lines cut off by a kill or damaged on disk."""
    for number, found in user_text.whole_lines(file):
        schema.check(found, keys, f"{file} line {number}:")
        yield found
