"""RUN/faults.jsonl: a line for every bad step, and for every time the run went back.

Lines are only ever added. What a run has done twice, because it went on from an older checkpoint,
is there twice: the last line of a step counts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from titan_dit.faults.guard import BadStep
from titan_dit.objectives.base import Batch, Objective
from titan_dit.rng import SampleRNG
from titan_dit.spans import spans_of

FILE = "faults.jsonl"


def bad_step(
    bad: BadStep, numbers: Sequence[int], rows: Sequence[int], timesteps: Sequence[float]
) -> dict[str, Any]:
    """The line of a bad step: what it was trained on, in the order of the sample numbers."""
    return {
        "step": bad.step,
        "kind": bad.kind,
        "grad_norm": bad.grad_norm if math.isfinite(bad.grad_norm) else None,
        "loss": bad.loss if math.isfinite(bad.loss) else None,
        "sample_numbers": spans_of(numbers),
        "rows": list(rows),
        "timesteps": list(timesteps),
    }


def rollback(step: int, to_step: int, first: int, end: int) -> dict[str, Any]:
    """The line of a return from `step` to `to_step`, leaving out samples `first` to `end`."""
    return {"step": step, "kind": "rollback", "to_step": to_step, "skipped": [first, end]}


def timesteps_of(
    objective: Objective, seed: int, numbers: Sequence[int], device: torch.device
) -> list[float]:
    """The timesteps that samples are trained at, in the network's unit, drawn once more."""
    wanted = torch.tensor(numbers, device=device)
    ones = torch.ones(len(numbers), device=device)
    # A token of one value: the timestep does not depend on what is corrupted.
    batch = Batch(ones[:, None, None], torch.zeros_like(wanted), wanted, ones, len(numbers), 1)
    drawn = objective.prepare(batch, SampleRNG(seed, wanted)).inputs["timestep"]
    return [float(timestep) for timestep in drawn.tolist()]


def read(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's file, without one that a kill cut short."""
    file = folder / FILE
    lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n") and line.startswith("{")]
