"""Flags of `convert`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from titan_dit.config.section import (
    Bound,
    Decay,
    Few,
    FilePath,
    Finite,
    NonNegativeInt,
    OutputPath,
    RunPath,
    Section,
)


@dataclass(frozen=True, kw_only=True)
class Options(Section):
    """Import weights of DiT, SiT, diffusers or transformers as a checkpoint, or export one."""

    section = "convert"

    source: Annotated[FilePath, tyro.conf.arg(name="from", aliases=["--run", "--checkpoint"])]
    """Import: FILE.pt or FILE.safetensors of the original DiT or of SiT, or a folder of
    transformers or of diffusers' DiTPipeline. Export: a run or a checkpoint."""
    to: OutputPath
    """Import: folder of the new checkpoint. Export: FILE.pt or FILE.safetensors of a DiT; a new
    folder for diffusers, or of a language model."""
    format: Literal["dit", "sit", "peft"] | None = None
    """Whose file is read or written: the original DiT's or SiT's, which have the same names. Unset:
    SiT's if its train.py wrote the file, or the run's [objective] is SiT's; else DiT's. peft: a
    folder of the run's adapters ([lora]) alone."""
    heads: Few | None = None
    """Import: attention heads, for sizes other than S, B, L and XL."""
    scale: Annotated[Finite, Bound(above=0)] | None = None
    """Import: scaling factor of the autoencoder's latents. Unset: 0.18215."""
    prediction: Literal["eps", "v", "x"] | None = None
    """Import: what the network predicts. Unset: eps (the noise), as the original."""
    noise_schedule: Literal["linear", "cosine"] | None = None
    """Import: the noise schedule. Unset: linear, as the original."""
    weights: Literal["ema", "model"] | None = None
    """Of a run, or of --base: EMA or model (non-averaged) weights. Unset: EMA."""
    decay: Decay | None = None
    """Of the same: EMA decay, if the run has several. Unset: the first."""
    vae: FilePath = ""
    """Export to diffusers: folder of the autoencoder, for a whole DiTPipeline; "none" writes the
    transformer alone. Unset: the one that made the run's latents, if it is a folder."""
    as_is: bool = False
    """Export to diffusers: also where it computes other timestep frequencies."""
    base: RunPath = ""
    """Import of a folder of peft: the run whose weights the adapters belong to."""
    step: NonNegativeInt | None = None
    """Of the same: step of the checkpoint. Unset: the newest."""
    trust: bool = False
    """Import modules that the run's config names, such as a model of your own: their code runs."""
