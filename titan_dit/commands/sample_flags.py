"""The flags of `sample` for every kind of run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from titan_dit.config.section import Bound, FilePath, PositiveInt, Section


@dataclass(frozen=True, kw_only=True)
class CommonFlags(Section):
    """What to draw from, and how much."""

    section = "sample"

    run: Annotated[FilePath, tyro.conf.arg(aliases=["--checkpoint"])]
    """Run directory, its checkpoints folder, or one checkpoint; a path or a URL."""
    out: FilePath = ""
    """Pictures: FILE.safetensors for `samples` and `labels`, or FILE.png for an image grid. Text:
    FILE.txt, or nothing to print it."""
    num: PositiveInt | None = None
    """Number of samples. Unset: 100 pictures, or 1 text."""
    seed: Annotated[int, Bound(least=0, below=2**63)] = 0
    """Sample i depends only on (seed, i), not on the batch size."""
    step: int | None = None
    """Step of the run's checkpoint. Unset: the newest."""
    weights: Literal["ema", "model"] = "ema"
    """EMA or model (non-averaged) weights."""
    decay: float | None = None
    """EMA decay, if the run has several. Unset: the first."""
    batch_size: PositiveInt = 250
    """Batch size; of texts fewer if their logits take more than 512 MiB."""
    device: str | None = None
    """Default: cuda if available, else cpu."""
