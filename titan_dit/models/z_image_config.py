"""The [model] section of Z-Image. Imports torch late, for a quick `--help`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from titan_dit.config.section import Dim, Few, Layers, PositiveFloat, UserError
from titan_dit.models.named_sizes import fill_in, shape_of
from titan_dit.models.text_to_image_config import TextToImageConfig, check_axes, default_axes

if TYPE_CHECKING:  # Reading a config must not import torch: methods import what they need.
    import torch
    from jaxtyping import Float, Int
    from torch import Tensor

    from titan_dit.models.base import TensorSpec
    from titan_dit.models.z_image import ZImage

SIZES = {
    #     hidden, layers, refiners of each kind, heads
    "6B": (3840, 30, 2, 30),
}
CONDITION = 256
"""Width of the embedded time, or `hidden_size` if that is smaller."""
TIME_MLP = 1024
"""Width between the two layers that embed the time."""


@dataclass(frozen=True, kw_only=True)
class ZImageConfig(TextToImageConfig):
    """Z-Image: `size`, or hidden_size, num_layers, num_refiner_layers and num_heads."""

    name = "z_image"
    replaces = {"size": ("hidden_size", "num_layers", "num_refiner_layers", "num_heads")}
    text_multiple: ClassVar[int] = 32
    """Captions and pictures are padded to a multiple of so many tokens."""

    size: str | None = None
    """6B (6,155 million parameters)."""
    hidden_size: Dim | None = None
    num_layers: Layers | None = None
    """Blocks that caption and picture pass together."""
    num_refiner_layers: Layers | None = None
    """Blocks before them for the caption alone, and the same number for the picture alone."""
    num_heads: Few | None = None
    patch_size: Few = 2
    """Latent pixels per token side."""
    in_channels: Few = 16
    """Channels of a latent."""
    text_tokens: Dim
    """Tokens of a caption, a multiple of 32: shorter ones are padded with a learned token, which is
    attended to."""
    text_dim: Dim = 2560
    """Width of the text encoder's embeddings."""
    rope_axes: tuple[Few, ...] = ()
    """Channels of a head that rotate by text index, row and column. Empty: 2, 3 and 3 eighths."""
    rope_theta: PositiveFloat = 256.0
    """Longest period of the rotary angles, in tokens / (2 pi)."""

    def __post_init__(self) -> None:
        """Fill in the named size, then check divisibility."""
        super().__post_init__()
        fill_in(self, self.size, shape_of(self.size, SIZES, self.replaces["size"]), "6B")
        check_axes(self.axes, self.shape, default_axes(self.shape))
        if self.rope_axes == default_axes(self.shape):  # As weights without the key have them.
            object.__setattr__(self, "rope_axes", ())
        self.check_latent_size()
        if self.text_tokens % self.text_multiple:
            above = self.padded(self.text_tokens)
            raise UserError(
                f"[model] text_tokens={self.text_tokens}: Z-Image pads captions to a multiple of "
                f"{self.text_multiple} tokens. Set text_tokens = {above}."
            )

    def padded(self, tokens: int) -> int:
        """A number of tokens after padding."""
        return -(-tokens // self.text_multiple) * self.text_multiple

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """hidden_size, number of blocks, num_heads, patch_size."""
        return self.hidden_size or 0, len(self.kinds), self.num_heads or 0, self.patch_size

    @property
    def axes(self) -> tuple[int, ...]:
        """Channels of a head that rotate by text index, row and column: 32, 48 and 48 of 128."""
        return self.rope_axes or default_axes(self.shape)

    @property
    def ffn(self) -> int:
        """Width of the MLP: 8/3 of hidden_size, computed as Z-Image's code does."""
        return int((self.hidden_size or 0) / 3 * 8)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Refiners of the caption, refiners of the picture, and the blocks of both."""
        refiners = self.num_refiner_layers or 0
        return (
            *("refine_text",) * refiners,
            *("refine_image",) * refiners,
            *("joint",) * (self.num_layers or 0),
        )

    @property
    def condition(self) -> tuple[str, int]:
        """The embedded time."""
        return "condition", min(self.hidden_size or 0, CONDITION)

    def with_text_tokens(self, tokens: int) -> ZImageConfig:
        """The same network for captions of `tokens` tokens, with their padding."""
        return replace(self, text_tokens=tokens)

    @property
    def num_real_tokens(self) -> int:
        """Tokens of a picture before padding, see `diffusion.base.PaddedModel`."""
        rows, columns = self.grid
        return rows * columns

    @property
    def token_shape(self) -> tuple[int, int]:
        """[n, d] of one tokenized latent, with its padding."""
        n, d = super().token_shape
        return self.padded(n), d

    def flops(self, output_channels: int, text_tokens: int, tokens: int) -> Mapping[str, int]:
        """See `TextToImageConfig.flops`.

        The patch embedding and the first layer of the time's MLP have no input gradient.
        """
        h, c, patch = self.shape[0], self.condition[1], self.patch_size

        def block(attended: int) -> int:
            return 6 * attended * (4 * h * h + 3 * h * self.ffn) + 12 * attended**2 * h

        patch_in = 4 * tokens * h * patch**2 * self.in_channels
        text_in = 6 * text_tokens * h * self.text_dim
        modulation = 24 * c * h
        return {
            "embed": patch_in + text_in + 1024 * TIME_MLP + 6 * TIME_MLP * c,
            "refine_text": block(text_tokens),
            "refine_image": block(tokens) + modulation,
            "joint": block(text_tokens + tokens) + modulation,
            "head": 6 * tokens * h * patch**2 * output_channels + 6 * c * h,
        }

    def build(self, output_channels: int) -> ZImage:
        """Build the network; the objective determines `output_channels`."""
        from titan_dit.models.z_image import ZImage

        return ZImage(self, output_channels)

    def tokenize(self, latents: Float[Tensor, "b c h w"]) -> Float[Tensor, "b n d"]:
        """Latents to tokens, then rows of zeros."""
        import torch.nn.functional as F

        tokens = super().tokenize(latents)
        return F.pad(tokens, (0, 0, 0, self.token_shape[0] - self.num_real_tokens))

    def detokenize(self, tokens: Float[Tensor, "b n d"]) -> Float[Tensor, "b c h w"]:
        """Tokens to latents, without the padding."""
        return super().detokenize(tokens[:, : self.num_real_tokens])

    def positions(self, device: torch.device) -> tuple[Int[Tensor, "m 3"], Int[Tensor, "n 3"]]:
        """(text index, row, column) of every token, of the caption and of the picture.

        A caption's m tokens are (i, 0, 0) from i = 1 on, those of the picture (m + 1, row, column).
        Padding of the picture is (0, 0, 0).
        """
        import torch
        import torch.nn.functional as F

        index = torch.arange(1, self.text_tokens + 1, device=device)
        text = torch.stack((index, torch.zeros_like(index), torch.zeros_like(index)), -1)
        rows, columns = (torch.arange(side, device=device) for side in self.grid)
        behind = torch.full((1,), self.text_tokens + 1, device=device)
        image = torch.cartesian_prod(behind, rows, columns)
        return text, F.pad(image, (0, 0, 0, self.token_shape[0] - len(image)))

    def static_specs(self) -> dict[str, TensorSpec]:
        """See `TextToImageConfig.static_specs`."""
        import torch

        from titan_dit.models.base import TensorSpec

        return {
            **super().static_specs(),
            "text_positions": TensorSpec((self.text_tokens,), token_dim=0, dtype=torch.int64),
            "is_real": TensorSpec(self.token_shape[:1], token_dim=0, dtype=torch.bool),
        }

    def static(self, device: torch.device) -> dict[str, Tensor]:
        """Places of the caption's tokens, which tokens of the picture are real, and the angles."""
        import torch

        from titan_dit.models.layers import rotary_on_axes

        text, image = self.positions(device)
        index = torch.arange(len(image), device=device)
        return {
            "text_positions": text[:, 0] - 1,
            "is_real": index < self.num_real_tokens,
            "text_rotary": rotary_on_axes(text, self.axes, self.rope_theta, torch.float64),
            "rotary": rotary_on_axes(image, self.axes, self.rope_theta, torch.float64),
        }
