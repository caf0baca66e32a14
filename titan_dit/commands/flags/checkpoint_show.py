"""Flags of `checkpoint show`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from titan_dit.config.section import NonNegativeInt, RunPath, Section


@dataclass(frozen=True, kw_only=True)
class Options(Section):
    """Print a checkpoint's step, samples, versions, tensors per part and config."""

    section = "checkpoint show"

    path: Annotated[RunPath, tyro.conf.Positional]
    """Run directory, its checkpoints folder, or one checkpoint; a path or a URL."""
    step: NonNegativeInt | None = None
    """Step of the run's checkpoint. Unset: the newest."""
    tensors: bool = False
    """Also print every tensor's name, shape and dtype."""
