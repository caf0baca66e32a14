"""RUN/faults.jsonl: a line for every bad step, and for every time the run went back.

Lines are only ever added. What a run has done twice, because it went on from an older checkpoint,
is there twice: the last line of a step counts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from titan_dit.data.sample_ranges import ranges_of
from titan_dit.objectives.base import Objective
from titan_dit.recovery.guard import BadStep
from titan_dit.rng import SampleRNG

FILE = "faults.jsonl"


def bad_step(
    bad: BadStep,
    numbers: Sequence[int],
    rows: Sequence[int],
    described: Mapping[str, Sequence[float]],
) -> dict[str, Any]:
    """The line of a bad step: what it was trained on, in the order of the sample numbers."""
    return {
        "step": bad.step,
        "kind": bad.kind,
        "grad_norm": bad.grad_norm if math.isfinite(bad.grad_norm) else None,
        "loss": bad.loss if math.isfinite(bad.loss) else None,
        "sample_numbers": ranges_of(numbers),
        "rows": list(rows),
        "drawn": {name: list(values) for name, values in described.items()},
    }


def rollback(step: int, to_step: int, first: int, end: int) -> dict[str, Any]:
    """The line of a return from `step` to `to_step`, leaving out samples `first` to `end`."""
    return {"step": step, "kind": "rollback", "to_step": to_step, "skipped": [first, end]}


def drawn_for(
    objective: Objective, seed: int, numbers: Sequence[int], device: torch.device
) -> dict[str, list[float]]:
    """What the objective says of samples without their data: its draws, made once more."""
    rng = SampleRNG(seed, torch.tensor(numbers, device=device))
    return {name: values.tolist() for name, values in objective.describe({}, rng).items()}


def read(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's file, without one that a kill cut short."""
    file = folder / FILE
    lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n") and line.startswith("{")]
