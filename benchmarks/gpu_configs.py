"""The config of a row of `gpu.py`: for `titan_dit plan --calibrate gpu.json`, and for a dry run."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from gpu_contenders import BF16, OBJECTIVES, Cell, linears_of

from titan_dit.config.job import JobConfig
from titan_dit.config.layout import PrecisionConfig
from titan_dit.config.training import TrainingConfig
from titan_dit.data.sections import Synthetic
from titan_dit.dry_run.fake_step import take_fake_step
from titan_dit.optim.sections import AdamWConfig
from titan_dit.parallel.float8 import is_converted
from titan_dit.plan import resolve

CONTENDERS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "ours": {},
    "ours_compiled": {"compile": {"enabled": True}},
    "ours_float8_tensorwise": {
        "compile": {"enabled": True},
        "precision": {"dtype": "bf16", "float8": "tensorwise"},
    },
    "ours_float8_rowwise": {
        "compile": {"enabled": True},
        "precision": {"dtype": "bf16", "float8": "rowwise"},
    },
}
"""Contenders that the planner describes -> the config sections in which they differ. The others
vary a kernel, an allocator or an optimizer of one step."""


def configs(wanted: Sequence[tuple[Cell, str]], device: str = "") -> Iterator[dict[str, Any]]:
    """The key of each row that the planner describes, with its config as `tables`.

    `in_float8` names the layers that "auto" converts on `device`: later versions may choose others.
    """
    for cell, name in wanted:
        if name in CONTENDERS:
            changes = CONTENDERS[name]
            entry = {**cell.key, "contender": name, "tables": tables_of(cell, changes)}
            if "float8" in changes.get("precision", {}):
                precision = PrecisionConfig(**changes["precision"])
                layers = linears_of(cell).items()
                entry["in_float8"] = [
                    key for key, one in layers if is_converted(one, precision, device)
                ]
            yield entry


def tables_of(cell: Cell, changes: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Config tables of what `ours.trainer_step` runs."""
    shape = {
        key: value for key, value in dataclasses.asdict(cell.config).items() if value is not None
    }
    tables = {
        "job": {"name": "gpu"},
        "model": {"name": "dit", **shape},
        "objective": {"name": cell.objective},
        "data": {"name": "latents", "path": "random"},
        "training": {"steps": 1, "global_batch_size": cell.batch},
        "precision": {"dtype": "bf16"},
        "optimizer": {"name": "adamw", "lr": 1e-4},
    }
    return {**tables, **changes}


def predict(pipe: Connection, cells: Sequence[Cell]) -> None:
    """Send (cell, GiB) of every cell: a process of its own, beside the rows, without the device."""
    os.nice(10)
    torch.set_num_threads(1)
    for cell in cells:
        pipe.send((cell, dry_run_gib(cell)))


def dry_run_gib(cell: Cell) -> float:
    """Peak memory of our eager step on one rank, by the dry run (docs/dry-run.md)."""
    settings, _ = OBJECTIVES[cell.objective]
    config = JobConfig(
        model=cell.config,
        objective=settings,
        data=Synthetic(
            latent_size=cell.config.latent_size,
            channels=cell.config.in_channels,
            num_classes=cell.config.num_classes,
        ),
        training=TrainingConfig(steps=1, global_batch_size=cell.batch),
        precision=BF16,
        optimizer=AdamWConfig(),
    )
    facts, fields = settings.example(cell.config)
    objective = settings.build(cell.config, facts)
    plan = resolve(config, 1)
    report = take_fake_step(plan, objective, fields, config.training, config.optimizer, config.ema)
    return report.peak / 2**30
