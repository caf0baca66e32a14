"""The config of a row of `gpu.py`, for `titan_dit plan --calibrate gpu.json`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpu_contenders import Cell

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


def configs(wanted: Sequence[tuple[Cell, str]]) -> Iterator[dict[str, Any]]:
    """The key of each row that the planner describes, with its config as `tables`."""
    for cell, name in wanted:
        if name in CONTENDERS:
            yield {**cell.key, "contender": name, "tables": tables_of(cell, CONTENDERS[name])}


def tables_of(cell: Cell, changes: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What `ours.trainer_step` runs, as config tables."""
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
