"""Flags of `evaluate`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from titan_dit.commands.flags.sample import DrawingFlags
from titan_dit.config.section import (
    BatchSize,
    Bound,
    Decay,
    Dim,
    FilePath,
    NonNegativeInt,
    OutputPath,
    RunPath,
    Section,
)


@dataclass(frozen=True, kw_only=True)
class LossFlags(Section):
    """What is scored, and how."""

    section = "evaluate"

    run: Annotated[RunPath, tyro.conf.arg(aliases=["--checkpoint"])] = ""
    """Run directory, its checkpoints folder, or one checkpoint; a path or a URL."""
    step: NonNegativeInt | None = None
    """Step of the run's checkpoint. Unset: the newest."""
    weights: Literal["ema", "model"] = "ema"
    """EMA or model (non-averaged) weights."""
    decay: Decay | None = None
    """EMA decay, if the run has several. Unset: the first."""
    batch_size: BatchSize | None = None
    """Samples of a forward pass on one rank. Unset: 16 for the loss, 250 to draw pictures."""
    out: OutputPath | None = None
    """FILE.json for the results."""
    device: str | None = None
    """Default: cuda if available, else cpu."""
    trust: bool = False
    """Import modules that the run's config names, such as a model of your own: their code runs."""


@dataclass(frozen=True, kw_only=True)
class ReferenceFlags(Section):
    """Pictures: what they are compared with, and by which metrics."""

    section = "evaluate"

    reference: FilePath = ""
    """Real pictures to compare drawn ones with: a folder, or FILE.npz with arr_0 (uint8
    [n, height, width, 3]) or with mu and sigma, as ADM's."""
    samples: FilePath = ""
    """Pictures to score in place of a run's: a folder or FILE.npz."""
    num: Dim = 50_000
    """Pictures to draw."""
    seed: Annotated[int, Bound(least=0, below=2**63)] = 0
    """Picture i depends only on (seed, i)."""
    features: str = "inception"
    """Network of the features: inception (FID), efficientnet, efficientnet:PIXELS, or your own
    module:function from uint8 (b, 3, h, w) to (b, d)."""
    feature_weights: FilePath = ""
    """File with the weights of inception."""
    metrics: str = "fid"
    """Of fid, kid, is and prdc (precision, recall, density, coverage), with commas."""
    save_samples: OutputPath = ""
    """FILE.npz for the drawn pictures, as ADM's evaluator reads it."""
    save_reference: OutputPath = ""
    """FILE.npz for the reference's mu and sigma: the next --reference, without its pictures."""


@dataclass(frozen=True, kw_only=True)
class Options(DrawingFlags, ReferenceFlags, LossFlags):
    """Score a trained run on its validation set, or with --reference the pictures it draws.

    Of the loss, every key of the config is a flag, too: --parallel.tp 2 chooses a layout,
    --data.path and --validation.path other places of the data.
    """

    section = "evaluate"
