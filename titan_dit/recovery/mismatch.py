"""Differences between the data of a checkpoint and a run, and advice about a mismatch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from titan_dit.checkpoint import checkpoint
from titan_dit.checkpoint.saved_weights import OWN
from titan_dit.checkpoint.store import Location
from titan_dit.config.section import show
from titan_dit.launcher.ranks import Ranks


def ways_out(path: Location, model: Mapping[str, Tensor], *, own: bool) -> str:
    """Ending of the error: what the user can do. `own`: the checkpoint is this run's. Collective.

    `model`: this rank's parameters by name; allow_changes does not change their shapes.
    """
    another = "start a new run with --job.name" if own else "train without --checkpoint.resume"
    if not fits(path, model):
        return f"Its weights do not fit this model: undo the change, or {another}."
    allow = "allow it with --checkpoint.allow_changes true"
    return f"Undo the change, {another}, or {allow}."


def fits(path: Location, model: Mapping[str, Tensor]) -> bool:
    """Return True if a checkpoint has the parameters of all ranks, in their shapes. Collective."""
    saved = {name: size for name, (size, _) in checkpoint.contents(path).items()}
    # An objective's own modules are in no weight file.
    ours = {name: t.shape for name, t in model.items() if not name.startswith(OWN)}
    return all(Ranks().gather(all(saved.get(f"model.{name}") == ours[name] for name in ours)))


def changed_facts(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The facts of a dataset that differ, such as its shape or its autoencoder."""
    # A checkpoint holds them as JSON, which has no tuples.
    found = {key: json.loads(json.dumps(value)) for key, value in now.items() if key != "digest"}
    return [
        f"[data] {key}: {show(before[key])} -> {show(value)}"
        for key, value in found.items()
        if key in before and before[key] != value
    ]
