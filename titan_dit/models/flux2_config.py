"""The [model] section of FLUX.2. Imports torch late, for a quick `--help`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from titan_dit.config.section import Bound, Dim, Few, GuidanceScale, Layers, PositiveFloat
from titan_dit.models.named_sizes import fill_in, shape_of
from titan_dit.models.text_to_image_config import ReferencedConfig, check_axes

if TYPE_CHECKING:  # Reading a config must not import torch: methods import what they need.
    import torch
    from jaxtyping import Int
    from torch import Tensor

    from titan_dit.models.flux2 import Flux2

SIZES = {
    #           hidden, double blocks, single blocks, heads
    "klein-4B": (3072, 5, 20, 24),
}
MODULATION = {"image": 6, "text": 6, "single": 3, "head": 2}
"""Parts of the modulation and their widths, in units of hidden_size."""
REFERENCE = 10
"""Number of a reference on the first rotary axis; the predicted picture has 0."""


@dataclass(frozen=True, kw_only=True)
class Flux2Config(ReferencedConfig):
    """FLUX.2: `size`, or hidden_size, num_double_layers, num_single_layers and num_heads."""

    name = "flux2"
    text_padding: ClassVar[Literal["kept"]] = "kept"
    replaces = {"size": ("hidden_size", "num_double_layers", "num_single_layers", "num_heads")}

    size: str | None = None
    """klein-4B (3,876 million parameters)."""
    hidden_size: Dim | None = None
    num_double_layers: Layers | None = None
    """Blocks with weights of their own for caption and picture."""
    num_single_layers: Layers | None = None
    """Blocks after them with the same weights for both."""
    num_heads: Few | None = None
    mlp_ratio: Annotated[float, Bound(above=0, most=1000)] = 3.0
    """Width of the MLPs (SwiGLU) / hidden_size."""
    in_channels: Few = 128
    """Channels of a latent: those of the autoencoder, whose 2x2 pixels are one of ours."""
    text_tokens: Dim = 512
    """Tokens of a caption, all of which are attended to: padding as the text encoder embeds it."""
    text_dim: Dim = 7680
    """Width of the text encoder's embeddings: for klein three layers of 2,560 side by side."""
    rope_axes: tuple[Few, ...] = ()
    """Channels of a head that rotate by picture, row, column and text index. Empty: a quarter
    each."""
    rope_theta: PositiveFloat = 2000.0
    """Longest period of the rotary angles, in tokens / (2 pi)."""
    guidance: GuidanceScale | None = None
    """The guidance scale that a guidance-distilled network (FLUX.2 dev) is given. Unset: the
    network has no embedding of it, as klein."""

    def __post_init__(self) -> None:
        """Fill in the named size, then check divisibility."""
        super().__post_init__()
        fill_in(self, self.size, shape_of(self.size, SIZES, self.replaces["size"]), "klein-4B")
        check_axes(self.axes, self.shape, self.default_axes)
        if self.rope_axes == self.default_axes:  # As weights without the key have them.
            object.__setattr__(self, "rope_axes", ())

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """hidden_size, number of blocks, num_heads, patch_size."""
        return self.hidden_size or 0, len(self.kinds), self.num_heads or 0, 1

    @property
    def axes(self) -> tuple[int, ...]:
        """Channels of a head that rotate by picture, row, column and text index."""
        return self.rope_axes or self.default_axes

    @property
    def default_axes(self) -> tuple[int, ...]:
        """`axes` if rope_axes is empty: a quarter of a head each."""
        hidden, _, heads, _ = self.shape
        return (hidden // heads // 4,) * 4

    @property
    def ffn(self) -> int:
        """Width of the MLPs."""
        return int((self.hidden_size or 0) * self.mlp_ratio)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Double blocks, then single ones."""
        doubles, singles = self.num_double_layers or 0, self.num_single_layers or 0
        return *("double",) * doubles, *("single",) * singles

    @property
    def condition(self) -> tuple[str, int]:
        """The modulation of all blocks and of the head, see `part_of_modulation`."""
        return "modulation", sum(MODULATION.values()) * self.shape[0]

    def part_of_modulation(self, name: str) -> tuple[int, int]:
        """First channel and number of channels of a part of the modulation."""
        names = list(MODULATION)
        first = sum(MODULATION[other] for other in names[: names.index(name)])
        return first * self.shape[0], MODULATION[name] * self.shape[0]

    def flops(self, output_channels: int, text_tokens: int, tokens: int) -> Mapping[str, int]:
        """See `TextToImageConfig.flops`.

        The embeddings of picture and caption, and the first layer of those of time and guidance,
        have no input gradient.
        """
        h, attended = self.shape[0], text_tokens + self.num_pictures * tokens
        embedded = self.all_channels + (self.num_pictures - 1) * self.in_channels
        inputs = 4 * h * (tokens * embedded + text_tokens * self.text_dim)
        scalars = (1024 * h + 6 * h * h) * (1 if self.guidance is None else 2)
        # A double block's two sets of weights meet the tokens of their own: the same FLOPs.
        block = 6 * attended * (4 * h * h + 3 * h * self.ffn) + 12 * attended**2 * h
        return {
            "embed": inputs + scalars + 6 * h * self.condition[1],
            "double": block,
            "single": block,
            "head": 6 * tokens * h * output_channels,
        }

    def build(self, output_channels: int) -> Flux2:
        """Build the network; the objective determines `output_channels`."""
        from titan_dit.models.flux2 import Flux2

        return Flux2(self, output_channels)

    def positions(self, device: torch.device) -> tuple[Int[Tensor, "_ 4"], ...]:
        """(picture, row, column, text index) of caption [m, 4], picture and reference [n, 4].

        A caption's tokens are (0, 0, 0, i), those of the picture (0, row, column, 0), those of a
        reference (10, row, column, 0), as in diffusers' `Flux2KleinPipeline`.
        """
        import torch

        zero = torch.zeros(1, dtype=torch.int64, device=device)
        index = torch.arange(self.text_tokens, device=device)
        rows, columns = (torch.arange(side, device=device) for side in self.grid)
        text = torch.cartesian_prod(zero, zero, zero, index)
        pictures = zero, zero + REFERENCE
        return text, *(torch.cartesian_prod(number, rows, columns, zero) for number in pictures)

    def static(self, device: torch.device) -> dict[str, Tensor]:
        """The angles of all kinds of tokens."""
        import torch

        from titan_dit.models.layers import rotary_on_axes

        text, image, reference = self.positions(device)
        kinds = {"text_rotary": text, "rotary": image}
        if self.reference_tokens:
            kinds["reference_rotary"] = reference
        return {
            name: rotary_on_axes(positions, self.axes, self.rope_theta, torch.float64)
            for name, positions in kinds.items()
        }
