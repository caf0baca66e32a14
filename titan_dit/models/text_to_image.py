"""The assembly of networks that take captions, from their embed, blocks and head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from titan_dit.models import initializers
from titan_dit.models.base import Model, SideInputs
from titan_dit.models.initializers import Initializer
from titan_dit.models.layers import CONDITION, joined, parted
from titan_dit.models.text_to_image_config import TextToImageConfig


class ModulationTable(nn.Module):
    """A part's own addition to the modulation that all blocks share."""

    def __init__(self, width: int) -> None:
        super().__init__()
        # One dim, as a bias has: Muon orthogonalises the matrices of blocks.
        self.table = nn.Parameter(torch.empty(width))

    def forward(self, shared: Float[Tensor, "*b _"]) -> Float[Tensor, "*b _"]:
        """The first `width` channels of the shared modulation, and the table."""
        return shared[..., : self.table.shape[0]] + self.table


def embedded_tokens(embed: Any, inputs: Mapping[str, Tensor]) -> Float[Tensor, "b _ d"]:
    """The picture's tokens in the stream, projected by `patch`; a reference's follow.

    Further channels are projected by `condition`, and added. `inputs`: as of the network.
    """
    dtype = embed.patch.weight.dtype
    tokens: Tensor = embed.patch(inputs["tokens"].to(dtype))
    if "condition" in inputs:
        tokens = tokens + embed.condition(inputs["condition"].to(dtype))
    if "reference" in inputs:
        tokens = joined(tokens, embed.patch(inputs["reference"].to(dtype)))
    return tokens


def image_rotary(side: SideInputs) -> Float[Tensor, "_ 2 p"]:
    """Angles of the stream's tokens: of the picture, then of a reference."""
    if "reference_rotary" not in side:
        return side["rotary"]
    return torch.cat((side["rotary"], side["reference_rotary"]))


def predicted(tokens: Float[Tensor, "b _ d"], side: SideInputs) -> Float[Tensor, "b n d"]:
    """The first half of the tokens if a reference follows the picture, else all.

    Also valid on a cp slice, which holds the same share of both.
    """
    if "reference_rotary" not in side:
        return tokens
    half = tokens.shape[1] // 2
    return parted(tokens, (half, half))[0]


class CaptionedNetwork(Model):
    """A network of a `TextToImageConfig`; a subclass names the classes of its parts."""

    embed_class: ClassVar[Any]
    """Built of the config."""
    block_classes: ClassVar[Mapping[str, Any]]
    """Kind of block -> its class, built of the config; "" if all are alike."""
    head_class: ClassVar[Any]
    """Built of the config and the output channels."""

    def __init__(self, config: TextToImageConfig, output_channels: int) -> None:
        super().__init__()
        self.config, self.output_channels = config, output_channels
        kinds = config.kinds or ("",) * config.shape[1]
        self.embed = self.embed_class(config)
        blocks = {str(i): self.block_classes[kind](config) for i, kind in enumerate(kinds)}
        self.blocks = nn.ModuleDict(blocks)
        self.head = self.head_class(config, output_channels)

    def initializers(self) -> dict[str, Initializer]:
        """See `initializers.adaln_zero`."""
        table = initializers.adaln_zero(name for name, _ in self.named_parameters())
        return table | ({CONDITION: initializers.zeros} if CONDITION in table else {})

    def flops_per_sample(self, tokens: int) -> int:
        """FLOPs of forward and backward per sample, of `tokens` tokens with those of the caption.

        Terms: `TextToImageConfig.flops`.
        """
        return self.config.flops_per_sample(self.output_channels, tokens)
