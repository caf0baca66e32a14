"""Flags of `sample`: those of every run, of pictures, and of text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from titan_dit.config.section import (
    BatchSize,
    Bound,
    Decay,
    Dim,
    FilePath,
    Fraction,
    GuidanceScale,
    NonNegativeFloat,
    NonNegativeInt,
    OutputPath,
    PositiveInt,
    RunPath,
    Section,
)


@dataclass(frozen=True, kw_only=True)
class CommonFlags(Section):
    """What to draw from, and how much."""

    section = "sample"

    run: Annotated[RunPath, tyro.conf.arg(aliases=["--checkpoint"])]
    """Run directory, its checkpoints folder, or one checkpoint; a path or a URL."""
    out: OutputPath = ""
    """Pictures: FILE.png for a grid, FILE.npz as ADM's evaluator reads it, FILE.safetensors for
    `samples` (latents) and `labels`, or a folder for a PNG each. Text: FILE.txt, or nothing to
    print it."""
    num: Dim | None = None
    """Number of samples. Unset: 100 pictures, or 1 text."""
    seed: Annotated[int, Bound(least=0, below=2**63)] = 0
    """Sample i depends only on (seed, i), not on the batch size."""
    step: NonNegativeInt | None = None
    """Step of the run's checkpoint. Unset: the newest."""
    weights: Literal["ema", "model"] = "ema"
    """EMA or model (non-averaged) weights."""
    decay: Decay | None = None
    """EMA decay, if the run has several. Unset: the first."""
    batch_size: BatchSize = 250
    """Batch size; of texts fewer if their logits take more than 512 MiB."""
    device: str | None = None
    """Default: cuda if available, else cpu."""
    trust: bool = False
    """Import modules that the run's config names, such as a model of your own: their code runs."""


@dataclass(frozen=True, kw_only=True)
class DrawingFlags(Section):
    """Classes, guidance, sampler and autoencoder."""

    section = "sample"

    labels: str = "all"
    """Classes: "all", or a list of numbers or names such as 3 or 0,cat; "none" is unconditional."""
    cfg_scale: GuidanceScale = 2.0
    """Classifier-free guidance scale; 1 disables it."""
    cfg_channels: PositiveInt | None = None
    """Guide only the first channels (the original DiT guides 3 of 4). Unset: all."""
    cfg_interval: tuple[Fraction, ...] = (0.0, 1.0)
    """Guide at noise levels from the first to the second only; 0 is data, 1 is noise."""
    cfg_rescale: Fraction = 0.0
    """Share of the guided prediction that gets back the std of the prediction with the label."""
    guide: RunPath | None = None
    """A run whose worse network guides in place of the prediction without label (autoguidance)."""
    vae: FilePath = ""
    """Autoencoder that decodes the latents, a folder or a name of diffusers; "none" writes
    latents. Unset: the one that made the run's latents."""
    eta: Fraction = 0.0
    """DDIM noise: 0 is deterministic, 1 adds as much as ddpm."""
    sampler: str = "auto"
    """heun, euler or dpmpp_2m for rectified_flow; ddim, ddpm or dpmpp_2m for ddpm; auto is the
    first of them. Or diffusers:CLASS, one of its schedulers."""
    steps: Annotated[int, Bound(least=1, most=10**5)] = 25
    """Sampling steps."""


@dataclass(frozen=True, kw_only=True)
class PictureFlags(DrawingFlags, CommonFlags):
    """Pictures: how they are drawn, or from which noise."""

    section = "sample"

    noise: FilePath | None = None
    """FILE.safetensors with the initial `noise` [n, c, h, w] and `labels` [n] (-1 or the number of
    classes is unconditional); replaces --num, --labels and the seed's noise."""


@dataclass(frozen=True, kw_only=True)
class TextFlags(CommonFlags):
    """Prompt, length, and how a token is drawn."""

    prompt: str = ""
    """Text: what to continue. Empty begins a document. Of a run without a tokenizer, token ids."""
    length: Annotated[int, Bound(least=1, most=10**6)] = 100
    """Text: tokens to draw; it ends earlier with its document."""
    temperature: NonNegativeFloat = 1.0
    """Text: divides the logits; 0 takes the most likely token."""
    top_k: PositiveInt | None = None
    """Text: draw from the most likely tokens only. Unset: from all."""
    top_p: Annotated[float, Bound(above=0, most=1)] = 1.0
    """Text: draw from the fewest most likely tokens with this probability together."""
    tokenizer: FilePath | None = None
    """Text: tokenizer.json. Unset: [data] tokenizer of the run."""


@dataclass(frozen=True, kw_only=True)
class Options(TextFlags, PictureFlags):
    """Draw samples from a trained run: pictures of a diffusion, text of a language model."""
