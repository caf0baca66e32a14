"""The [model] section of a text-to-image DiT. Imports torch late, for a quick `--help`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from titan_dit.config.section import (
    Dim,
    Few,
    HeightWidth,
    Layers,
    PositiveFloat,
    Section,
    UserError,
    show,
)
from titan_dit.models.named_sizes import fill_in, with_patch

if TYPE_CHECKING:  # Reading a config must not import torch: methods import what they need.
    import torch
    from jaxtyping import Float, Int
    from torch import Tensor

    from titan_dit.models.base import ModelSpec
    from titan_dit.models.joint_dit import JointDiT

SIZES = {
    #      hidden, layers, heads; heads have 64 or 128 channels, which no attention kernel pads.
    "S": (384, 12, 6),
    "B": (768, 12, 12),
    "L": (1024, 24, 16),
    "XL": (1536, 24, 24),
    "2B": (2048, 40, 16),
}
PATCHES = (1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class JointDiTConfig(Section):
    """A DiT that is given captions: `size`, or hidden_size, num_layers, num_heads, patch_size."""

    section = "model"
    name = "joint_dit"
    replaces = {"size": ("hidden_size", "num_layers", "num_heads", "patch_size")}

    size: str | None = None
    """S, B, L, XL or 2B (24, 94, 318, 708, 2071 million parameters), with the patch behind a slash:
    "XL/2" (1, 2, 4 or 8)."""
    hidden_size: Dim | None = None
    num_layers: Layers | None = None
    num_heads: Few | None = None
    patch_size: Few | None = None
    """Latent pixels per token side."""
    intermediate_size: Dim | None = None
    """Width of the MLP (SwiGLU). Unset: 8/3 x hidden_size, rounded up to 64."""
    latent_size: HeightWidth
    """[height, width] of a latent; one number for a square."""
    in_channels: Few
    """Channels of a latent."""
    text_tokens: Dim
    """Tokens of a caption: shorter ones are padded with a learned token, which is attended to."""
    text_dim: Dim
    """Width of the text encoder's embeddings."""
    rope_theta: PositiveFloat = 256.0
    """Longest period of the rotary angles, in tokens / (2 pi)."""

    def __post_init__(self) -> None:
        """Fill in the named size, then check divisibility."""
        super().__post_init__()
        fill_in(self, self.size, with_patch(self.size, SIZES, PATCHES), "XL/2")
        self._check_heads()
        self._check_latent_size()

    def _check_heads(self) -> None:
        hidden, _, heads, _ = self.shape
        unit = 2 * heads
        if hidden % unit or hidden < 3 * unit:
            raise UserError(
                f"[model] hidden_size={hidden} with num_heads={heads}: rotary positions on three "
                "axes need an even number of channels per head, at least 6. Set hidden_size = "
                f"{max(3, -(-hidden // unit)) * unit}."
            )

    def _check_latent_size(self) -> None:
        patch = self.shape[3]
        if any(side % patch for side in self.latent_size):
            fit = [-(-side // patch) * patch for side in self.latent_size]
            raise UserError(
                f"[model] latent_size={show(self.latent_size)} is not divisible by "
                f"patch_size={patch}. Set latent_size = {show(fit)} or another patch_size."
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
        return self.intermediate_size or -(-8 * self.shape[0] // 192) * 64

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of a picture's tokens."""
        height, width = self.latent_size
        return height // self.shape[3], width // self.shape[3]

    def at_size(self, height: int, width: int) -> JointDiTConfig:
        """The same network for latents of another size. Raises UserError if the patch misfits."""
        return replace(self, latent_size=(height, width))

    @property
    def sample_shape(self) -> tuple[int, int, int]:
        """[c, h, w] of one latent."""
        height, width = self.latent_size
        return self.in_channels, height, width

    @property
    def token_shape(self) -> tuple[int, int]:
        """[n, d] of one tokenized latent."""
        rows, columns = self.grid
        return rows * columns, self.shape[3] ** 2 * self.in_channels

    @property
    def axes(self) -> tuple[int, int, int]:
        """Channels of a head that rotate by text index, row and column: about 2, 3 and 3 eighths.

        As in Z-Image (32, 48 and 48 of 128).
        """
        pairs = self.shape[0] // self.shape[2] // 2
        side = max(1, 3 * pairs // 8)
        return 2 * (pairs - 2 * side), 2 * side, 2 * side

    def flops(self, output_channels: int, text_tokens: int, tokens: int) -> Mapping[str, int]:
        """FLOPs of forward and backward per sample, of `embed`, one of the `blocks` and `head`.

        2 per multiply-add of a matmul, without recomputation. `tokens`: of the picture. The patch
        embedding and the first layer of the timestep's MLP have no input gradient.
        """
        h, _, _, patch = self.shape
        n, attended = tokens, text_tokens + tokens
        patch_in = 4 * n * h * patch**2 * self.in_channels
        text_in = 6 * text_tokens * h * self.text_dim
        # Timestep MLP, then the modulation of all blocks and of the head.
        condition = 1024 * h + 6 * h * h + 48 * h * h
        linear = 6 * attended * (4 * h * h + 3 * h * self.ffn)
        return {
            "embed": patch_in + text_in + condition,
            "block": linear + 12 * attended**2 * h,
            "head": 6 * n * h * patch**2 * output_channels,
        }

    def spec(self, output_channels: int | None = None) -> ModelSpec:
        """Describe the network; `output_channels` defaults to in_channels."""
        import torch

        from titan_dit.models.base import ModelSpec, TensorSpec

        outputs = output_channels or self.in_channels
        hidden, layers, heads, patch = self.shape
        (n, values), m = self.token_shape, self.text_tokens
        pairs = hidden // heads // 2
        flops = self.flops(outputs, m, n)
        return ModelSpec(
            build=partial(self.build, outputs),
            inputs={
                "tokens": TensorSpec((n, values), token_dim=0, dtype=torch.float32),
                "timestep": TensorSpec((), dtype=torch.float32),
                "text": TensorSpec((m, self.text_dim), token_dim=0),
                "text_length": TensorSpec((), dtype=torch.int64),
            },
            stream={
                "tokens": TensorSpec((n, hidden), token_dim=0),
                "text": TensorSpec((m, hidden), token_dim=0),
                "modulation": TensorSpec((8 * hidden,), at_least_fp32=True),
            },
            predictions={"prediction": TensorSpec((n, patch * patch * outputs), token_dim=0)},
            static={
                "text_positions": TensorSpec((m,), token_dim=0, dtype=torch.int64),
                "text_rotary": TensorSpec((m, 2, pairs), token_dim=0, dtype=torch.float32),
                "rotary": TensorSpec((n, 2, pairs), token_dim=0, dtype=torch.float32),
            },
            num_layers=layers,
            num_heads=heads,
            head_dim=hidden // heads,
            ffn=self.ffn,
            num_tokens=n,
            num_text_tokens=m,
            embed_cost=flops["embed"] / flops["block"],
            head_cost=flops["head"] / flops["block"],
        )

    def build(self, output_channels: int) -> JointDiT:
        """Build the network; the objective determines `output_channels`."""
        from titan_dit.models.joint_dit import JointDiT

        return JointDiT(self, output_channels)

    def tokenize(self, latents: Float[Tensor, "b c h w"]) -> Float[Tensor, "b n d"]:
        """Latents to tokens."""
        from titan_dit.models.layers import patchify

        return patchify(latents, self.shape[3])

    def detokenize(self, tokens: Float[Tensor, "b n d"]) -> Float[Tensor, "b c h w"]:
        """Tokens to latents; a learned sigma adds channels after the first in_channels."""
        from titan_dit.models.layers import unpatchify

        return unpatchify(tokens, self.shape[3], self.latent_size[0])

    def positions(self, device: torch.device) -> tuple[Int[Tensor, "m 3"], Int[Tensor, "n 3"]]:
        """(text index, row, column) of every token, of the caption and of the picture.

        A caption's tokens are (i, 0, 0), those of the picture (text_tokens, row, column).
        """
        import torch

        index = torch.arange(self.text_tokens, device=device)
        text = torch.stack((index, torch.zeros_like(index), torch.zeros_like(index)), -1)
        rows, columns = (torch.arange(side, device=device) for side in self.grid)
        behind = torch.full((1,), self.text_tokens, device=device)
        return text, torch.cartesian_prod(behind, rows, columns)

    def static(self, device: torch.device) -> dict[str, Tensor]:
        """Positions of the caption's tokens, and cosines and sines of both kinds of tokens."""
        from titan_dit.models.layers import rotary_on_axes

        text, image = self.positions(device)
        return {
            "text_positions": text[:, 0],
            "text_rotary": rotary_on_axes(text, self.axes, self.rope_theta),
            "rotary": rotary_on_axes(image, self.axes, self.rope_theta),
        }
