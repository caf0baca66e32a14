"""Flags of `evaluate`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from titan_dit.config.section import FilePath, PositiveInt, Section


@dataclass(frozen=True, kw_only=True)
class Options(Section):
    """Score a trained run on its validation set. Every key of the config is a flag, too.

    --parallel.tp 2 chooses a layout, --data.path and --validation.path other places of the data.
    """

    section = "evaluate"

    run: Annotated[FilePath, tyro.conf.arg(aliases=["--checkpoint"])]
    """Run directory, its checkpoints folder, or one checkpoint; a path or a URL."""
    step: int | None = None
    """Step of the run's checkpoint. Unset: the newest."""
    weights: Literal["ema", "model"] = "ema"
    """EMA or model (non-averaged) weights."""
    decay: float | None = None
    """EMA decay, if the run has several. Unset: the first."""
    batch_size: PositiveInt = 16
    """Samples of a forward pass on one rank."""
    out: FilePath | None = None
    """FILE.json for the results."""
    device: str | None = None
    """Default: cuda if available, else cpu."""
