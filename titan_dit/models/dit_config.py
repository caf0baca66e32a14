"""The [model] section of a DiT. Imports torch late, for a quick `--help`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

from titan_dit.config.section import Bound, Channels, Dim, Few, Layers, Section, UserError
from titan_dit.models.named_sizes import fill_in, with_patch

if TYPE_CHECKING:  # Reading a config must not import torch: methods import what they need.
    import torch
    from jaxtyping import Float
    from torch import Tensor

    from titan_dit.models.base import ModelSpec
    from titan_dit.models.dit import DiT

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
class DiTConfig(Section):
    """A DiT: `size`, or hidden_size, num_layers, num_heads and patch_size one by one."""

    section = "model"
    name = "dit"
    replaces = {"size": ("hidden_size", "num_layers", "num_heads", "patch_size")}

    size: str | None = None
    """S, B, L, XL, 3B or 7B, with the patch behind a slash: "XL/2" (2, 4 or 8)."""
    hidden_size: Dim | None = None
    num_layers: Layers | None = None
    num_heads: Few | None = None
    patch_size: Few | None = None
    """Latent pixels per token side."""
    mlp_ratio: Annotated[float, Bound(above=0, most=1000)] = 4.0
    """MLP width / hidden_size."""
    latent_size: Few
    """Height and width of a latent."""
    in_channels: Few
    """Channels of a latent."""
    num_classes: Dim
    """Number of labels, not counting the null class for guidance."""
    condition_channels: Channels = 0
    """Channels of what the network is given of a sample, such as a reference picture, beside its
    noisy latent; their weights start at zero."""
    qk_norm: bool = False
    """RMS-normalise queries and keys per head (arXiv:2302.05442)."""
    timestep_frequencies: Literal["dit", "diffusers"] = "dit"
    """Frequencies of the timestep embedding: 10000 ** (-i / 128) as in the original DiT, or
    10000 ** (-i / 127) as in diffusers. Weights trained with one are wrong with the other: train
    with "diffusers" to export to it."""

    def __post_init__(self) -> None:
        """Fill in the named size, then check divisibility."""
        super().__post_init__()
        fill_in(self, self.size, with_patch(self.size, SIZES, PATCHES), "XL/2")
        self._check_divisibility()

    def _check_divisibility(self) -> None:
        hidden, _, heads, patch = self.shape
        if hidden % heads:
            fit = [h for h in range(1, hidden + 1) if hidden % h == 0]
            best, unit = min(fit, key=lambda h: abs(h - heads)), math.lcm(heads, 4)
            raise UserError(
                f"[model] hidden_size={hidden} is not divisible by num_heads={heads}. Set "
                f"num_heads = {best} or hidden_size = {max(1, round(hidden / unit)) * unit}."
            )
        if hidden % 4:
            raise UserError(
                f"[model] hidden_size={hidden} must be a multiple of 4 for the sin-cos positions. "
                f"Set hidden_size = {(hidden + 3) // 4 * 4}."
            )
        if self.latent_size % patch:
            raise UserError(
                f"[model] latent_size={self.latent_size} is not divisible by patch_size={patch}. "
                f"Set latent_size = {(self.latent_size + patch - 1) // patch * patch} "
                "or another patch_size."
            )

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """hidden_size, num_layers, num_heads, patch_size."""
        named = self.hidden_size, self.num_layers, self.num_heads, self.patch_size
        hidden, layers, heads, patch = (number or 0 for number in named)
        return hidden, layers, heads, patch

    @property
    def ffn(self) -> int:
        """Width of the MLP."""
        return round(self.shape[0] * self.mlp_ratio)

    @property
    def sample_shape(self) -> tuple[int, int, int]:
        """[c, h, w] of one latent."""
        return self.in_channels, self.latent_size, self.latent_size

    @property
    def token_shape(self) -> tuple[int, int]:
        """[n, d] of one tokenized latent."""
        patch = self.shape[3]
        return (self.latent_size // patch) ** 2, patch * patch * self.in_channels

    def edge_costs(self, output_channels: int) -> tuple[float, float]:
        """Cost of embed and head relative to a block, by FLOPs; see `DiT.flops_per_sample`."""
        embed, block, head = self.flops(self.token_shape[0], output_channels)
        return embed / block, head / block

    def flops(self, tokens: int, output_channels: int) -> tuple[int, int, int]:
        """(embed, a block, head): FLOPs of forward and backward; see `DiT.flops_per_sample`."""
        h, _, _, patch = self.shape
        n, ffn = tokens, self.ffn
        block = 24 * n * h * h + 12 * n * n * h + 12 * n * h * ffn + 36 * h * h
        channels = self.in_channels + self.condition_channels
        embed = 4 * n * h * patch**2 * channels + 1024 * h + 6 * h * h
        head = 6 * n * h * patch**2 * output_channels + 12 * h * h
        return embed, block, head

    def spec(self, output_channels: int | None = None) -> ModelSpec:
        """Describe the network; `output_channels` defaults to in_channels."""
        import torch

        from titan_dit.models.base import ModelSpec, TensorSpec

        outputs = output_channels or self.in_channels
        hidden, layers, heads, patch = self.shape
        n, values = self.token_shape
        embed, head = self.edge_costs(outputs)
        given = patch * patch * self.condition_channels
        condition = {"condition": TensorSpec((n, given), token_dim=0, dtype=torch.float32)}
        return ModelSpec(
            build=partial(self.build, outputs),
            inputs={
                "tokens": TensorSpec((n, values), token_dim=0, dtype=torch.float32),
                "timestep": TensorSpec((), dtype=torch.float32),
                "labels": TensorSpec((), dtype=torch.int64),
                **(condition if given else {}),
            },
            stream={
                "tokens": TensorSpec((n, hidden), token_dim=0),
                "embedding": TensorSpec((hidden,)),
            },
            predictions={"prediction": TensorSpec((n, patch * patch * outputs), token_dim=0)},
            static={"positions": TensorSpec((n, hidden), token_dim=0, dtype=torch.float32)},
            num_layers=layers,
            num_heads=heads,
            head_dim=hidden // heads,
            ffn=self.ffn,
            num_tokens=n,
            embed_cost=embed,
            head_cost=head,
        )

    def build(self, output_channels: int) -> DiT:
        """Build the network; the objective determines `output_channels`."""
        from titan_dit.models.dit import DiT

        return DiT(self, output_channels)

    def tokenize(self, latents: Float[Tensor, "b c h w"]) -> Float[Tensor, "b n d"]:
        """Latents to tokens."""
        from titan_dit.models.layers import patchify

        return patchify(latents, self.shape[3])

    def detokenize(self, tokens: Float[Tensor, "b n d"]) -> Float[Tensor, "b c h w"]:
        """Tokens to latents; a learned sigma adds channels after the first in_channels."""
        from titan_dit.models.layers import unpatchify

        return unpatchify(tokens, self.shape[3], self.latent_size)

    def static(self, device: torch.device) -> dict[str, Tensor]:
        """The embedded (row, column) positions of the square token grid, [n, hidden]."""
        from titan_dit.models.layers import grid_positions, sincos_positions

        side = self.latent_size // self.shape[3]
        grid = grid_positions(side, side, device)
        return {"positions": sincos_positions(grid, self.shape[0])}
