"""Flags of `predict`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from titan_dit.config.section import (
    BatchSize,
    Decay,
    FilePath,
    NonNegativeInt,
    OutputPath,
    RunPath,
    Section,
)


@dataclass(frozen=True, kw_only=True)
class Options(Section):
    """Run the network on latents, timesteps and labels, or on token ids, from a file."""

    section = "predict"

    checkpoint: Annotated[RunPath, tyro.conf.arg(aliases=["--run"])]
    """Run directory, its checkpoints folder, or one checkpoint; a path or a URL."""
    inputs: FilePath
    """FILE.safetensors with `x` [b, c, h, w], `t` [b] (0-based timesteps, as in the original) and
    `y` [b] (labels; -1 or the number of classes is unconditional). With `noise` of x's shape, x is
    the clean latents, and the objective computes the network's noisy input at t. Of a language
    model `tokens` [b, n], n up to sequence_length; of a BERT also `types` [b, n], else 0, and
    after training on pairs `lengths` [b], else n."""
    out: OutputPath
    """FILE.safetensors for `out` [b, c_out, h, w], the prediction and then any learned sigma. With
    `noise`, also the loss per sample and its terms, `loss_mse`, ... [b]. Of a language model the
    logits [b, n, vocabulary]."""
    weights: Literal["ema", "model"] = "ema"
    """EMA or model (non-averaged) weights."""
    decay: Decay | None = None
    """EMA decay, if the run has several. Unset: the first."""
    step: NonNegativeInt | None = None
    """Step of the run's checkpoint. Unset: the newest."""
    batch_size: BatchSize = 64
    """Batch size."""
    device: str | None = None
    """Default: cuda if available, else cpu."""
    trust: bool = False
    """Import modules that the run's config names, such as a model of your own: their code runs."""
