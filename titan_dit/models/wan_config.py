"""The [model] section of Wan. Imports torch late, for a quick `--help`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from titan_dit.config.section import Dim, Few, Layers, PositiveFloat, UserError
from titan_dit.models.named_sizes import fill_in, shape_of
from titan_dit.models.text_to_image_config import ConditionedConfig, check_axes

if TYPE_CHECKING:  # Reading a config must not import torch: methods import what they need.
    import torch
    from jaxtyping import Float, Int
    from torch import Tensor

    from titan_dit.models.base import ModelSpec, TensorSpec
    from titan_dit.models.wan import Wan

SIZES = {
    #       hidden, layers, heads, intermediate
    "1.3B": (1536, 30, 12, 8960),
    "14B": (5120, 40, 40, 13824),
}
MODULATION = 6, 1
"""Parts of the modulation of a block, and of the time that the head is given, each of hidden_size
channels."""


@dataclass(frozen=True, kw_only=True)
class WanConfig(ConditionedConfig):
    """Wan, of clips: `size`, or hidden_size, num_layers, num_heads and intermediate_size."""

    name = "wan"
    replaces = {"size": ("hidden_size", "num_layers", "num_heads", "intermediate_size")}
    text_padding: ClassVar[Literal["removed"]] = "removed"
    """Zeros stand behind a caption, not the encoder's padding."""

    size: str | None = None
    """1.3B or 14B (1,419 and 14,288 million parameters)."""
    hidden_size: Dim | None = None
    num_layers: Layers | None = None
    num_heads: Few | None = None
    intermediate_size: Dim | None = None
    """Width of the MLP."""
    patch_size: Few = 2
    """Latent pixels per token side; a token is of one latent frame."""
    latent_frames: Few | None = None
    """Latent frames of a clip: (frames - 1) / 4 + 1 for Wan's autoencoder, so 81 frames give 21; 1
    is a picture. Unset: those of the data, of its largest bucket."""
    in_channels: Few = 16
    """Channels of a latent."""
    text_tokens: Dim = 512
    """Tokens of a caption: shorter ones are padded with zeros, which are attended to."""
    text_dim: Dim = 4096
    """Width of the text encoder's embeddings."""
    rope_axes: tuple[Few, ...] = ()
    """Channels of a head that rotate by frame, row and column. Empty: a third each, the rest of a
    division by six going to the frame."""
    rope_theta: PositiveFloat = 10000.0
    """Longest period of the rotary angles, in tokens / (2 pi)."""

    def __post_init__(self) -> None:
        """Fill in the named size, then check divisibility."""
        super().__post_init__()
        fill_in(self, self.size, shape_of(self.size, SIZES, self.replaces["size"]), "1.3B")
        check_axes(self.axes, self.shape, self.default_axes)
        self.check_latent_size()

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """hidden_size, num_layers, num_heads, patch_size."""
        named = self.hidden_size, self.num_layers, self.num_heads
        hidden, layers, heads = (number or 0 for number in named)
        return hidden, layers, heads, self.patch_size

    @property
    def axes(self) -> tuple[int, ...]:
        """Channels of a head that rotate by frame, row and column: 44, 42 and 42 of 128."""
        return self.rope_axes or self.default_axes

    @property
    def default_axes(self) -> tuple[int, ...]:
        """`axes` if rope_axes is empty: about a third of a head each."""
        hidden, _, heads, _ = self.shape
        side = 2 * (hidden // heads // 6)
        return hidden // heads - 2 * side, side, side

    @property
    def ffn(self) -> int:
        """Width of the MLP."""
        return self.intermediate_size or 0

    @property
    def kinds(self) -> tuple[str, ...]:
        """All blocks are alike."""
        return ()

    @property
    def condition(self) -> tuple[str, int]:
        """The modulation of every block, 6 d, and the embedded time, d, for the head."""
        return "modulation", sum(MODULATION) * self.shape[0]

    @property
    def grid(self) -> tuple[int, ...]:
        """Frames, rows and columns of a clip's tokens."""
        return self.frames, *super().grid

    @property
    def frames(self) -> int:
        """Frames of a latent. Raises UserError if they are not set."""
        if self.latent_frames is None:
            raise UserError('[model] name="wan": latent_frames is not set. Set those of a latent.')
        return self.latent_frames

    @property
    def has_size(self) -> bool:
        """See `diffusion.base.UnsizedModel`."""
        return super().has_size and self.latent_frames is not None

    def with_size(self, *size: int) -> Self:
        """See `diffusion.base.UnsizedModel`; a picture is a clip of one frame."""
        sized = super().with_size(*size)
        return replace(sized, latent_frames=self.latent_frames or (1, *size)[-3])

    def at_size(self, *size: int) -> Self:
        """See `TextToImageConfig.at_size`."""
        frames, height, width = size
        return replace(self, latent_frames=frames, latent_size=(height, width))

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """[c, f, h, w] of one latent."""
        return self.in_channels, self.frames, *self.sides

    def flops(self, output_channels: int, text_tokens: int, tokens: int) -> Mapping[str, int]:
        """See `TextToImageConfig.flops`.

        The patch embedding and the first layers of the MLPs of time and text have no input
        gradient.
        """
        h, n, m, patch = self.shape[0], tokens, text_tokens, self.patch_size
        inputs = 4 * h * (n * patch**2 * self.all_channels + m * self.text_dim)
        # Second layer of the text's MLP; the time's MLP, then the modulation of all blocks.
        condition = 6 * m * h * h + 1024 * h + 6 * h * h + 6 * h * MODULATION[0] * h
        of_tokens = 6 * n * (6 * h * h + 2 * h * self.ffn)
        return {
            "embed": inputs + condition,
            "block": of_tokens + 12 * m * h * h + 12 * n * (n + m) * h,
            "head": 6 * n * h * patch**2 * output_channels,
        }

    def flops_per_sample(self, output_channels: int, tokens: int) -> int:
        """FLOPs of the whole network per sample, of `tokens` tokens of the clip."""
        return super().flops_per_sample(output_channels, tokens + self.text_tokens)

    def spec(self, output_channels: int | None = None) -> ModelSpec:
        """See `TextToImageConfig.spec`: the text, which only cross-attention sees, stays whole."""
        from titan_dit.models.base import TensorSpec

        spec = super().spec(output_channels)
        text = TensorSpec((self.text_tokens, self.text_dim))
        # Every block adds to its gradient.
        projected = TensorSpec((self.text_tokens, self.shape[0]), at_least_fp32=True)
        return replace(
            spec,
            inputs={**spec.inputs, "text": text},
            stream={**spec.stream, "text": projected},
            num_text_tokens=0,
        )

    def build(self, output_channels: int) -> Wan:
        """Build the network; the objective determines `output_channels`."""
        from titan_dit.models.wan import Wan

        return Wan(self, output_channels)

    def tokenize(self, latents: Float[Tensor, "b c f h w"]) -> Float[Tensor, "b n d"]:
        """Latents to tokens, frame by frame."""
        frames = super().tokenize(latents.transpose(1, 2).flatten(0, 1))
        return frames.view(len(latents), self.token_shape[0], -1)

    def detokenize(self, tokens: Float[Tensor, "b n d"]) -> Float[Tensor, "b c f h w"]:
        """Tokens to latents; a learned sigma adds channels after the first in_channels."""
        frames = tokens.view(len(tokens) * self.frames, -1, tokens.shape[2])
        latents = super().detokenize(frames)
        return latents.view(len(tokens), -1, *latents.shape[1:]).transpose(1, 2)

    def positions(self, device: torch.device) -> Int[Tensor, "n 3"]:
        """(frame, row, column) of every token."""
        import torch

        return torch.cartesian_prod(*(torch.arange(side, device=device) for side in self.grid))

    def static_specs(self) -> dict[str, TensorSpec]:
        """See `TextToImageConfig.static_specs`; the text is not rotated."""
        return {"rotary": super().static_specs()["rotary"]}

    def static(self, device: torch.device) -> dict[str, Tensor]:
        """The angles of the tokens."""
        import torch

        from titan_dit.models.layers import rotary_on_axes

        angles = rotary_on_axes(self.positions(device), self.axes, self.rope_theta, torch.float64)
        return {"rotary": angles}
