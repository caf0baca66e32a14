"""Wan: a DiT of clips that attend to a caption (arXiv:2503.20314), as `WanTransformer3DModel`.

A block has attention among the clip's tokens, cross-attention to the caption, and an MLP. The time
modulates and gates the first and the last by adaLN: one projection that all blocks share, and a
table per block (PixArt-alpha, arXiv:2310.00426 sec. 2.3). Queries and keys are RMS-normalised over
all heads together; those of the clip are rotated by (frame, row, column), neighbouring channels
together (arXiv:2104.09864).

A caption has `text_tokens` tokens: zeros stand behind the encoder's, are projected as these are,
and are attended to. Time and prediction are those of [objective] direction = "to_noise".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from titan_dit.models import initializers
from titan_dit.models.base import SideInputs, Stream
from titan_dit.models.initializers import Initializer
from titan_dit.models.layers import (
    MLP,
    Attention,
    CrossAttention,
    TimestepEmbedder,
    condition_projection,
    is_token_first,
    modulate,
    scaled_add,
)
from titan_dit.models.text_to_image import CaptionedNetwork, ModulationTable, embedded_tokens
from titan_dit.models.wan_config import MODULATION, WanConfig

EPS = 1e-6
"""Epsilon of all norms."""


def exactly(x: Tensor) -> Tensor:
    """`x` in fp32 or fp64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def modulated(x: Float[Tensor, "b n d"], shift: Tensor, scale: Tensor) -> Float[Tensor, "b n d"]:
    """LayerNorm, `shift` and `scale` [b, 1 or n, d] in fp32 or fp64, rounded once.

    `shift` and `scale`: see `parts_of`.
    """
    return modulate(exactly(x), shift, scale).to(x.dtype)


def gated(
    x: Float[Tensor, "b n d"], gate: Tensor, update: Float[Tensor, "b n d"]
) -> Float[Tensor, "b n d"]:
    """Compute x + gate * update in fp32 or fp64, rounded once; `gate` [b, 1 or n, d]."""
    return scaled_add(exactly(x), gate, exactly(update)).to(x.dtype)


def parts_of(modulation: Float[Tensor, "b *n _"], count: int) -> tuple[Tensor, ...]:
    """`count` parts of a modulation, each [b, 1, d]; [b, n, d] with a time per token."""
    by_token = modulation if modulation.ndim == 3 else modulation[:, None]
    return by_token.chunk(count, -1)


class ExactNorm(nn.LayerNorm):
    """LayerNorm with weights, in fp32 or fp64 and rounded once."""

    def forward(self, input: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        """Normalise every token, in the memory order of `input`."""
        swaps = is_token_first(input)
        x = input.transpose(0, 1) if swaps else input
        weights = exactly(self.weight), exactly(self.bias)
        normed = F.layer_norm(exactly(x), self.normalized_shape, *weights, self.eps).to(x.dtype)
        return normed.transpose(0, 1) if swaps else normed


class Embed(nn.Module):
    """Inputs to the stream: clip [b, n, d], caption [b, m, d] and modulation [b, 7 d]."""

    reads: ClassVar = {"text.*": ("text",)}

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        hidden, _, _, patch = config.shape
        self.patch = nn.Linear(patch * patch * config.in_channels, hidden)
        self.condition = condition_projection(config.condition_channels, patch, hidden)
        self.text = MLP(config.text_dim, hidden, outputs=hidden)
        self.timestep = TimestepEmbedder(hidden)
        self.modulation = nn.Linear(hidden, MODULATION[0] * hidden)

    def forward(self, inputs: Mapping[str, Tensor], side: SideInputs) -> Stream:
        """`tokens` [b, n, p*p*c], `timestep` [b] in 0..1000, `text` [b, m, e], `text_length` [b].

        Rows of `text` from `text_length` on count as zeros. A `timestep` of every token, [b, n],
        makes the modulation [b, n, 7 d]. With condition channels `condition` [b, n, p*p*k].
        """
        dtype = self.patch.weight.dtype
        text, timestep = inputs["text"].to(dtype), inputs["timestep"]
        index = torch.arange(text.shape[1], device=text.device)
        is_given = index < inputs["text_length"][:, None]
        time = self.timestep(timestep)  # In fp32 or fp64, see `Wan.exact`.
        modulation = exactly(self.modulation(F.silu(time).to(dtype)))
        projected = exactly(self.text(torch.where(is_given[..., None], text, 0)))
        # At least fp32: gradients of text and modulation are sums over all blocks.
        return embedded_tokens(self, inputs), projected, torch.cat((modulation, exactly(time)), -1)


class Block(nn.Module):
    """Attention and MLP, modulated and gated by the time, and cross-attention between them."""

    reads: ClassVar = {"cross.kv": ("text",)}

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        hidden, _, heads, _ = config.shape
        self.modulation = ModulationTable(MODULATION[0] * hidden)
        self.attn = Attention(hidden, heads, norm_eps=EPS, pairs="neighbours", norm_over_heads=True)
        self.cross_norm = ExactNorm(hidden, eps=EPS)
        self.cross = CrossAttention(hidden, heads)
        self.mlp = MLP(hidden, config.ffn)

    def forward(self, stream: Stream, side: SideInputs) -> Stream:
        """Update the clip's tokens; caption and modulation pass through."""
        x, text, modulation = stream
        parts = parts_of(self.modulation(modulation), MODULATION[0])
        shift_attn, scale_attn, gate_attn, shift_mlp, scale_mlp, gate_mlp = parts
        cos, sin = side["rotary"].unbind(1)
        attended = self.attn(modulated(x, shift_attn, scale_attn), rotary=(cos, sin))
        x = gated(x, gate_attn, attended)
        x = x + self.cross(self.cross_norm(x), text.to(x.dtype))
        x = gated(x, gate_mlp, self.mlp(modulated(x, shift_mlp, scale_mlp)))
        return x, text, modulation


class Head(nn.Module):
    """The stream to a prediction [b, n, p*p*c_out]."""

    def __init__(self, config: WanConfig, output_channels: int) -> None:
        super().__init__()
        hidden, _, _, patch = config.shape
        self.modulation = ModulationTable(2 * hidden)
        self.out = nn.Linear(hidden, patch * patch * output_channels)

    def forward(self, stream: Stream, side: SideInputs) -> Float[Tensor, "b n d"]:
        """The last adaLN and the output layer; the caption ends here."""
        tokens, _, modulation = stream
        time = modulation[..., -tokens.shape[-1] :]
        # Shift and scale have the time in common.
        shift, scale = parts_of(self.modulation(torch.cat((time, time), -1)), 2)
        prediction: Tensor = self.out(modulated(tokens, shift, scale))
        return prediction


class Wan(CaptionedNetwork):
    """The whole network."""

    embed_class, head_class = Embed, Head
    block_classes: ClassVar = {"": Block}
    exact = (
        "embed.timestep",
        "blocks.*.modulation",
        "blocks.*.cross_norm",
        "head.modulation",
    )

    def initializers(self) -> dict[str, Initializer]:
        """See `initializers.adaln_zero`; cross-attention is not gated, so blocks start with it."""
        table = super().initializers()
        norms = ("norm.q", "norm.k")
        return table | {name: initializers.ones for name in table if name.endswith(norms)}
