"""The [model] section of a text-to-image DiT. Imports torch late, for a quick `--help`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from titan_dit.config.section import Dim, Few, Layers, PositiveFloat, UserError
from titan_dit.models.named_sizes import fill_in, with_patch
from titan_dit.models.text_to_image_config import ReferencedConfig, default_axes

if TYPE_CHECKING:  # Reading a config must not import torch: methods import what they need.
    import torch
    from jaxtyping import Int
    from torch import Tensor

    from titan_dit.models.base import TensorSpec
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
class JointDiTConfig(ReferencedConfig):
    """A DiT that is given captions: `size`, or hidden_size, num_layers, num_heads, patch_size."""

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
    text_tokens: Dim
    """Tokens of a caption: shorter ones are padded with a learned token, which is attended to."""
    rope_theta: PositiveFloat = 256.0
    """Longest period of the rotary angles, in tokens / (2 pi)."""

    def __post_init__(self) -> None:
        """Fill in the named size, then check divisibility."""
        super().__post_init__()
        fill_in(self, self.size, with_patch(self.size, SIZES, PATCHES), "XL/2")
        self._check_heads()
        self.check_latent_size()

    def _check_heads(self) -> None:
        hidden, _, heads, _ = self.shape
        unit = 2 * heads
        if hidden % unit or hidden < 3 * unit:
            raise UserError(
                f"[model] hidden_size={hidden} with num_heads={heads}: rotary positions on three "
                "axes need an even number of channels per head, at least 6. Set hidden_size = "
                f"{max(3, -(-hidden // unit)) * unit}."
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
    def kinds(self) -> tuple[str, ...]:
        """All blocks are alike."""
        return ()

    @property
    def condition(self) -> tuple[str, int]:
        """The modulation of every block, 6 d, and of the head, 2 d."""
        return "modulation", 8 * self.shape[0]

    @property
    def axes(self) -> tuple[int, int, int]:
        """Channels of a head that rotate by text index, row and column: about 2, 3 and 3 eighths.

        As in Z-Image (32, 48 and 48 of 128).
        """
        return default_axes(self.shape)

    def flops(self, output_channels: int, text_tokens: int, tokens: int) -> Mapping[str, int]:
        """FLOPs of forward and backward per sample, of `embed`, one of the `blocks` and `head`.

        See `TextToImageConfig.flops`. The patch embedding and the first layer of the timestep's
        MLP have no input gradient.
        """
        h, _, _, patch = self.shape
        n, attended = tokens, text_tokens + self.num_pictures * tokens
        embedded = self.all_channels + (self.num_pictures - 1) * self.in_channels
        patch_in = 4 * n * h * patch**2 * embedded
        text_in = 6 * text_tokens * h * self.text_dim
        # Timestep MLP, then the modulation of all blocks and of the head.
        condition = 1024 * h + 6 * h * h + 48 * h * h
        linear = 6 * attended * (4 * h * h + 3 * h * self.ffn)
        return {
            "embed": patch_in + text_in + condition,
            "block": linear + 12 * attended**2 * h,
            "head": 6 * n * h * patch**2 * output_channels,
        }

    def static_specs(self) -> dict[str, TensorSpec]:
        """See `TextToImageConfig.static_specs`."""
        import torch

        from titan_dit.models.base import TensorSpec

        positions = TensorSpec((self.text_tokens,), token_dim=0, dtype=torch.int64)
        return {**super().static_specs(), "text_positions": positions}

    def build(self, output_channels: int) -> JointDiT:
        """Build the network; the objective determines `output_channels`."""
        from titan_dit.models.joint_dit import JointDiT

        return JointDiT(self, output_channels)

    def positions(self, device: torch.device) -> tuple[Int[Tensor, "_ 3"], ...]:
        """(text index, row, column) of all tokens, of caption [m, 3], picture and reference [n, 3].

        A caption's tokens are (i, 0, 0), those of the picture (text_tokens, row, column), those of
        a reference (text_tokens + 1, row, column).
        """
        import torch

        index = torch.arange(self.text_tokens, device=device)
        text = torch.stack((index, torch.zeros_like(index), torch.zeros_like(index)), -1)
        rows, columns = (torch.arange(side, device=device) for side in self.grid)
        behind = torch.arange(self.text_tokens, self.text_tokens + 2, device=device)[:, None]
        return text, *(torch.cartesian_prod(first, rows, columns) for first in behind)

    def static(self, device: torch.device) -> dict[str, Tensor]:
        """Positions of the caption's tokens, and cosines and sines of all kinds of tokens."""
        from titan_dit.models.layers import rotary_on_axes

        text, image, reference = self.positions(device)
        kinds = {"text_rotary": text, "rotary": image}
        if self.reference_tokens:
            kinds["reference_rotary"] = reference
        angles = {n: rotary_on_axes(p, self.axes, self.rope_theta) for n, p in kinds.items()}
        return {"text_positions": text[:, 0], **angles}
