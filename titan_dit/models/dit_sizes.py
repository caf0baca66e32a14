"""The keys of a DiT, and the sizes that follow from them.

Without torch, so that `--help` is quick.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, Literal

from titan_dit.config.section import Bound, Dim, Few, Layers, Section, UserError, show
from titan_dit.models.named_sizes import fill_in

SIZES = {
    #      hidden, layers, heads
    "S": (384, 12, 6),
    "B": (768, 12, 12),
    "L": (1024, 24, 16),
    "XL": (1152, 28, 16),
    "3B": (2048, 40, 16),
    "7B": (4096, 24, 32),
}
PATCHES = (2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class DiTSizes(Section):
    """A DiT: `size`, or `hidden`, `layers`, `heads` and `patch` one by one."""

    section = "model"
    name = "dit"
    replaces = {"size": ("hidden", "layers", "heads", "patch")}

    size: str | None = None
    """S, B, L, XL, 3B or 7B, with the patch behind a slash: "XL/2" (2, 4 or 8)."""
    hidden: Dim | None = None
    layers: Layers | None = None
    heads: Few | None = None
    patch: Few | None = None
    """Latent pixels per token side."""
    mlp_ratio: Annotated[float, Bound(above=0, most=1000)] = 4.0
    """MLP width / `hidden`."""
    latent_size: Few
    """Height and width of a latent."""
    channels: Few
    """Channels of a latent."""
    num_classes: Dim
    """Number of labels, not counting the null class for guidance."""
    qk_norm: bool = False
    """RMS-normalise queries and keys per head (arXiv:2302.05442)."""
    timestep_frequencies: Literal["dit", "diffusers"] = "dit"
    """Frequencies of the timestep embedding: 10000 ** (-i / 128) as in the original DiT, or
    10000 ** (-i / 127) as in diffusers. Weights trained with one are wrong with the other: train
    with "diffusers" to export to it."""

    def __post_init__(self) -> None:
        """Fill in the named size, then check divisibility."""
        super().__post_init__()
        fill_in(self, self.size, self._named(), "XL/2")
        self._check_divisibility()

    def _named(self) -> tuple[int, int, int, int] | None:
        """hidden, layers, heads and patch of the named size."""
        if self.size is None:
            return None
        match = re.fullmatch(r"(\w+)/(\d+)", self.size)
        if not match or match[1] not in SIZES or int(match[2]) not in PATCHES:
            raise UserError(
                f"[model] size={show(self.size)} is not one of {', '.join(SIZES)} with a patch of "
                f'{", ".join(map(str, PATCHES))}, such as "XL/2".'
            )
        return *SIZES[match[1]], int(match[2])

    def _check_divisibility(self) -> None:
        hidden, _, heads, patch = self.shape
        if hidden % heads:
            fit = [h for h in range(1, hidden + 1) if hidden % h == 0]
            best, unit = min(fit, key=lambda h: abs(h - heads)), math.lcm(heads, 4)
            raise UserError(
                f"[model] hidden={hidden} is not divisible by heads={heads}. "
                f"Set heads = {best} or hidden = {max(1, round(hidden / unit)) * unit}."
            )
        if hidden % 4:
            raise UserError(
                f"[model] hidden={hidden} must be a multiple of 4 for the sin-cos positions. "
                f"Set hidden = {(hidden + 3) // 4 * 4}."
            )
        if self.latent_size % patch:
            raise UserError(
                f"[model] latent_size={self.latent_size} is not divisible by patch={patch}. "
                f"Set latent_size = {(self.latent_size + patch - 1) // patch * patch} "
                "or another patch."
            )

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """hidden, layers, heads, patch."""
        named = self.hidden, self.layers, self.heads, self.patch
        hidden, layers, heads, patch = (number or 0 for number in named)
        return hidden, layers, heads, patch

    @property
    def ffn(self) -> int:
        """Width of the MLP."""
        return round(self.shape[0] * self.mlp_ratio)

    @property
    def sample_shape(self) -> tuple[int, int, int]:
        """[c, h, w] of one latent."""
        return self.channels, self.latent_size, self.latent_size

    @property
    def token_shape(self) -> tuple[int, int]:
        """[n, d] of one tokenized latent."""
        patch = self.shape[3]
        return (self.latent_size // patch) ** 2, patch * patch * self.channels

    def edge_costs(self, output_channels: int) -> tuple[float, float]:
        """Cost of embed and head relative to a block, by FLOPs; see `DiT.flops_per_sample`."""
        h, _, _, patch = self.shape
        n, ffn = self.token_shape[0], self.ffn
        block = 24 * n * h * h + 12 * n * n * h + 12 * n * h * ffn + 36 * h * h
        embed = 4 * n * h * patch**2 * self.channels + 1024 * h + 6 * h * h
        head = 6 * n * h * patch**2 * output_channels + 12 * h * h
        return embed / block, head / block
