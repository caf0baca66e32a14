"""Pixels in place of latents: what `data encode --vae none` stores, for models without one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import UInt8
from torch import Tensor

from titan_dit.config.section import UserError
from titan_dit.data.latent_facts import VAEFacts

NO_VAE = "none"
"""The value of --vae for pixels."""


@dataclass(frozen=True)
class Pixels:
    """In the place of an Autoencoder: a row is the picture itself, uint8 RGB as of `data pack`."""

    device: torch.device

    facts: ClassVar[VAEFacts] = VAEFacts(kind="pixels", digest="", factor=1)
    source: ClassVar[str] = f"--vae {NO_VAE}"
    channels: ClassVar[int] = 3
    scale: ClassVar[float] = 1 / 127.5
    shift: ClassVar[float] = 127.5
    """A model sees black as -1 and white as 1."""
    value_range: ClassVar[tuple[float, float]] = (0.0, 255.0)
    is_of_clips: ClassVar[bool] = False
    entry: ClassVar[None] = None
    """The manifest's `vae`."""

    def encode(
        self, pictures: UInt8[Tensor, "b 3 *size"]
    ) -> tuple[UInt8[Tensor, "b 3 *size"], UInt8[Tensor, "b 3 *size"]]:
        """The pictures, or clips, as the mean of a posterior, and its std, 0."""
        return pictures, torch.zeros_like(pictures)


def check_stored(posterior: str, dtype: str, units: str) -> None:
    """Raise UserError for a flag about latents: its value is not the default."""
    for flag, value, default in (
        ("posterior", posterior, "both"),
        ("dtype", dtype, "float16"),
        ("units", units, "vae"),
    ):
        if value != default:
            raise UserError(
                f"[data encode] {flag}={value} is about latents, but --vae {NO_VAE} stores pixels "
                f"as uint8. Leave --{flag} out."
            )
