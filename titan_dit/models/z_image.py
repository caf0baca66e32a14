"""Z-Image: a single-stream DiT with refiners (arXiv:2511.22699), as `ZImageTransformer2DModel`.

Two refiners of the caption and two of the picture come before the blocks that both pass together.
A block normalises with RMSNorm before and after attention and MLP (SwiGLU). The embedded time, 256
wide, scales the normed tokens and, through tanh, gates what is added: adaLN without a shift.
Refiners of the caption do not see the time. Queries and keys are RMS-normalised and rotated by
(text index, row, column), neighbouring channels together (arXiv:2104.09864).

Caption and picture are padded to multiples of 32 tokens with learned tokens that are attended to,
so attention has no mask. The released weights run with [objective] direction = "to_data": they see
1000 x (1 - t) and predict data - noise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from titan_dit.models.base import SideInputs, Stream
from titan_dit.models.layers import (
    Attention,
    GatedMLP,
    JoinedRotary,
    PaddedEmbedder,
    Rotary,
    TimestepEmbedder,
    joined,
    normalized,
    parted,
    scaled_add,
)
from titan_dit.models.text_to_image import CaptionedNetwork
from titan_dit.models.z_image_config import TIME_MLP, ZImageConfig

EPS = 1e-5
"""Epsilon of all norms but the head's."""


class Embed(nn.Module):
    """Inputs to the stream: picture [b, n, d], caption [b, m, d] and embedded time [b, c]."""

    reads: ClassVar = {"text.*": ("text",)}

    def __init__(self, config: ZImageConfig) -> None:
        super().__init__()
        hidden, _, _, patch = config.shape
        self.patch = PaddedEmbedder(patch * patch * config.in_channels, hidden)
        self.text = PaddedEmbedder(config.text_dim, hidden, norm_eps=EPS)
        self.timestep = TimestepEmbedder(config.condition[1], inner=TIME_MLP)

    def forward(self, inputs: Mapping[str, Tensor], side: SideInputs) -> Stream:
        """`tokens` [b, n, p*p*c], `timestep` [b] in 0..1000, `text` [b, m, e], `text_length` [b].

        Rows of `text` from `text_length` on, and of `tokens` beyond the picture, are padding.
        """
        tokens = self.patch(inputs["tokens"], side["is_real"][None])
        is_real = side["text_positions"] < inputs["text_length"][:, None]
        condition = self.timestep(inputs["timestep"])
        # At least fp32: its gradient is a sum over all blocks.
        exact = condition.to(torch.promote_types(condition.dtype, torch.float32))
        return tokens, self.text(inputs["text"], is_real), exact


class Block(nn.Module):
    """Attention and MLP between norms; all kinds of blocks share `update`."""

    def __init__(self, config: ZImageConfig) -> None:
        super().__init__()
        hidden, _, heads, _ = config.shape
        self.rotary = JoinedRotary()
        self.attn = Attention(
            hidden, heads, qk_norm=True, bias=False, norm_eps=EPS, pairs="neighbours"
        )
        self.mlp = GatedMLP(hidden, config.ffn, bias=False)
        self.attn_norm = nn.RMSNorm(hidden, eps=EPS)
        self.attn_out_norm = nn.RMSNorm(hidden, eps=EPS)
        self.mlp_norm = nn.RMSNorm(hidden, eps=EPS)
        self.mlp_out_norm = nn.RMSNorm(hidden, eps=EPS)

    def update(self, x: Float[Tensor, "b n d"], rotary: Rotary) -> Float[Tensor, "b n d"]:
        """The tokens after attention and MLP, without the time."""
        x = x + self.attn_out_norm(self.attn(self.attn_norm(x), rotary=rotary))
        updated: Tensor = x + self.mlp_out_norm(self.mlp(self.mlp_norm(x)))
        return updated


class TextRefiner(Block):
    """A block of the caption alone."""

    kind: ClassVar[str] = "refine_text"
    reads: ClassVar = {"*": ("text",)}

    def forward(self, stream: Stream, side: SideInputs) -> Stream:
        """Update the caption; the rest passes through."""
        tokens, text, condition = stream
        return tokens, self.update(text, self.rotary(side["text_rotary"])), condition


class ModulatedBlock(Block):
    """A block that the time scales and gates."""

    def __init__(self, config: ZImageConfig) -> None:
        super().__init__(config)
        self.modulation = nn.Linear(config.condition[1], 4 * config.shape[0])

    def modulated(
        self, x: Float[Tensor, "b n d"], condition: Tensor, rotary: Rotary
    ) -> Float[Tensor, "b n d"]:
        """The tokens after attention and MLP. `condition`: [b, c]."""
        parts = self.modulation(condition.to(x.dtype))[:, None].chunk(4, -1)  # each [b, 1, d]
        scale_attn, gate_attn, scale_mlp, gate_mlp = parts
        attended = self.attn(self.attn_norm(x) * (1 + scale_attn), rotary=rotary)
        x = scaled_add(x, gate_attn.tanh(), self.attn_out_norm(attended))
        y = self.mlp(self.mlp_norm(x) * (1 + scale_mlp))
        return scaled_add(x, gate_mlp.tanh(), self.mlp_out_norm(y))


class ImageRefiner(ModulatedBlock):
    """A block of the picture alone."""

    kind: ClassVar[str] = "refine_image"

    def forward(self, stream: Stream, side: SideInputs) -> Stream:
        """Update the picture; the rest passes through."""
        tokens, text, condition = stream
        return self.modulated(tokens, condition, self.rotary(side["rotary"])), text, condition


class JointBlock(ModulatedBlock):
    """A block of caption and picture together."""

    kind: ClassVar[str] = "joint"
    reads: ClassVar = {"*": ("text", "tokens")}

    def forward(self, stream: Stream, side: SideInputs) -> Stream:
        """Update the tokens; the condition passes through."""
        tokens, text, condition = stream
        rotary = self.rotary(side["text_rotary"], side["rotary"])
        x = self.modulated(joined(text, tokens), condition, rotary)
        text, tokens = parted(x, (text.shape[1], tokens.shape[1]))
        return tokens, text, condition


class Head(nn.Module):
    """The stream to a prediction [b, n, p*p*c_out]."""

    def __init__(self, config: ZImageConfig, output_channels: int) -> None:
        super().__init__()
        hidden, _, _, patch = config.shape
        self.modulation = nn.Linear(config.condition[1], hidden)
        self.out = nn.Linear(hidden, patch * patch * output_channels)

    def forward(self, stream: Stream, side: SideInputs) -> Float[Tensor, "b n d"]:
        """The last norm, scaled by the time, and the output layer; the caption ends here."""
        tokens, _, condition = stream
        scale = self.modulation(F.silu(condition.to(tokens.dtype)))[:, None]
        prediction: Tensor = self.out(normalized(tokens) * (1 + scale))
        return prediction


class ZImage(CaptionedNetwork):
    """The whole network. Refiners of the caption do not start as the identity."""

    embed_class, head_class = Embed, Head
    block_classes: ClassVar = {
        "refine_text": TextRefiner,
        "refine_image": ImageRefiner,
        "joint": JointBlock,
    }
