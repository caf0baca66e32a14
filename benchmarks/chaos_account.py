"""Lost samples of a run of chaos.py, and its bits or losses against the undisturbed run."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, state_dict_loader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from titan_dit.recovery.ledger import Ledger, trained

BATCH = 24
"""Samples per step."""


def newest(run: Path) -> Path | None:
    """The newest complete checkpoint."""
    found = sorted((run / "checkpoints").glob("step-*/manifest.json"))
    return found[-1].parent if found and found[-1].parent.suffix == "" else None


def account(run: Path, steps: int) -> dict[str, int]:
    """Counts of samples: all, lost, trained on twice, and outside the run."""
    last = newest(run)
    assert last, run
    record = json.loads((last / "manifest.json").read_text())
    assert record["step"] == steps
    counted: Counter[int] = trained(run, Ledger.of(record))
    wanted = range(steps * BATCH)
    return {
        "samples": len(wanted),
        "lost": sum(counted[number] == 0 for number in wanted),
        "twice": sum(times > 1 for times in counted.values()),
        "strange": sum(number not in wanted for number in counted),
    }


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Full tensors of a checkpoint."""
    entries = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    state_dict_loader.load(state, checkpoint_id=checkpoint, no_dist=True)
    return state


def same_bits(run: Path, other: Path) -> tuple[bool, str]:
    """(True if the last checkpoints of two runs are bitwise equal, description)."""
    first, second = newest(run), newest(other)
    assert first
    assert second
    mine, its = tensors_of(first), tensors_of(second)
    differing = [n for n in mine.keys() | its.keys() if not torch.equal(mine[n], its[n])]
    return not differing, f"{len(differing)} of {len(its)} tensors differ"


def losses(run: Path) -> dict[int, float]:
    """Loss by step."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows}


def same_curve(run: Path, other: Path) -> tuple[bool, str]:
    """(True if two loss curves agree to 1e-5, description)."""
    mine, its = losses(run), losses(other)
    assert mine.keys() == its.keys()
    error = max(abs(mine[step] - its[step]) / its[step] for step in its)
    return error <= 1e-5, f"loss within {error:.1e}"


def verdict(found: tuple[bool, str]) -> dict[str, Any]:
    """Columns of the comparison with the undisturbed run."""
    return {"as undisturbed": found[0], "compared": found[1]}
