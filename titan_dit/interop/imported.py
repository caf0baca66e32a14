"""Write imported weights as a checkpoint, from which runs start."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from titan_dit import __version__
from titan_dit.checkpoint import checkpoint
from titan_dit.config import catalog, config_file
from titan_dit.config.section import UserError
from titan_dit.data.base import DataFacts
from titan_dit.interop.write_progress import writing
from titan_dit.system.files import PARTIAL

EMA_DECAY = "0.9999"
"""Decay of the imported average; runs with another one start from it, too."""


def record_of(tables: config_file.Tables, facts: DataFacts) -> dict[str, Any]:
    """Return the checkpoint's record, like that of a run at step 0.

    `tables`: [model], [objective] and [data]; other sections are unknown and get their defaults.
    """
    filled = tables | {
        "training": {"steps": 1, "global_batch_size": 1},
        "ema": {"decays": [float(EMA_DECAY)], "warmup": False},
    }
    whole = config_file.build(filled, catalog.variant)
    whole = replace(whole, job=whole.job.settled())
    return {
        "step": 0,
        "cursor": 0,
        "nan_steps": 0,
        "imported": True,
        "config": config_file.to_tables(whole),
        "config_format": config_file.FORMAT,
        "data": facts.as_json(),
        "versions": {"titan_dit": __version__, "torch": torch.__version__},
    }


def save(target: Path, tensors: dict[str, Any], record: dict[str, Any]) -> None:
    """Write the checkpoint atomically."""
    aside = target.with_name(f"{target.resolve().name}{PARTIAL}")
    if aside.exists():
        raise UserError(f"--to {target}: {aside} exists. Delete it, or choose another name.")
    final = target.with_name(target.resolve().name)
    try:
        with writing(final, (tensor for _, tensor in checkpoint.flatten(tensors))):
            checkpoint.write(final, tensors, record)
    except (OSError, RuntimeError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise UserError(f"--to {target} cannot be written: {str(error).splitlines()[0]}") from None
