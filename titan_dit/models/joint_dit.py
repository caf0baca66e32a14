"""A text-to-image DiT: the tokens of a caption and of a picture in one attention.

adaLN-Zero by one projection of the time that all blocks share, and a table per block
(PixArt-alpha, arXiv:2310.00426 sec. 2.3). A block's weights serve both kinds of tokens. Queries and
keys are RMS-normalised (arXiv:2302.05442) and rotated by (text index, row, column)
(arXiv:2104.09864); pairs of channels are halves of a head, see `layers.rotate`. The MLP is SwiGLU.

Captions are padded with a learned token that is attended to, so attention has no mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from titan_dit.models.base import SideInputs, Stream
from titan_dit.models.joint_dit_config import JointDiTConfig
from titan_dit.models.layers import (
    Attention,
    GatedMLP,
    JoinedRotary,
    PaddedEmbedder,
    TimestepEmbedder,
    condition_projection,
    joined,
    modulate,
    parted,
    scaled_add,
)
from titan_dit.models.text_to_image import (
    CaptionedNetwork,
    ModulationTable,
    embedded_tokens,
    image_rotary,
    predicted,
)


class Embed(nn.Module):
    """Inputs to the stream: picture [b, n, d], caption [b, m, d] and modulation [b, 8 d].

    With a reference the picture has 2 n tokens, see `ReferencedConfig`.
    """

    reads: ClassVar = {"text.*": ("text",)}

    def __init__(self, config: JointDiTConfig) -> None:
        super().__init__()
        hidden, _, _, patch = config.shape
        self.patch = nn.Linear(patch * patch * config.in_channels, hidden)
        self.condition = condition_projection(config.condition_channels, patch, hidden)
        self.text = PaddedEmbedder(config.text_dim, hidden, norm_eps=1e-6)
        self.timestep = TimestepEmbedder(hidden)
        self.modulation = nn.Linear(hidden, 8 * hidden)

    def forward(self, inputs: Mapping[str, Tensor], side: SideInputs) -> Stream:
        """`tokens` [b, n, p*p*c], `timestep` [b] in 0..1000, `text` [b, m, e], `text_length` [b].

        Rows of `text` from `text_length` on are padding, of any finite values. With condition
        channels `condition` [b, n, p*p*k]; with reference tokens `reference` [b, n, p*p*c].
        """
        tokens = embedded_tokens(self, inputs)
        is_real = side["text_positions"] < inputs["text_length"][:, None]
        embedding = nn.functional.silu(self.timestep(inputs["timestep"]))
        modulation = self.modulation(embedding)
        # At least fp32: its gradient is a sum over all blocks.
        exact = modulation.to(torch.promote_types(modulation.dtype, torch.float32))
        return tokens, self.text(inputs["text"], is_real), exact


class Block(nn.Module):
    """Joint attention and MLP, each modulated and gated by the time."""

    reads: ClassVar = {"*": ("text", "tokens")}

    def __init__(self, config: JointDiTConfig) -> None:
        super().__init__()
        hidden, _, heads, _ = config.shape
        self.modulation = ModulationTable(6 * hidden)
        self.rotary = JoinedRotary()
        self.attn = Attention(hidden, heads, qk_norm=True, bias=False)
        self.mlp = GatedMLP(hidden, config.ffn, bias=False)

    def forward(self, stream: Stream, side: SideInputs) -> Stream:
        """Update the tokens; the modulation passes through."""
        tokens, text, modulation = stream
        x = joined(text, tokens)
        parts = self.modulation(modulation).to(x.dtype)[:, None].chunk(6, -1)  # each [b, 1, d]
        shift_attn, scale_attn, gate_attn, shift_mlp, scale_mlp, gate_mlp = parts
        rotary = self.rotary(side["text_rotary"], image_rotary(side))
        attended = self.attn(modulate(x, shift_attn, scale_attn), rotary=rotary)
        x = scaled_add(x, gate_attn, attended)
        x = scaled_add(x, gate_mlp, self.mlp(modulate(x, shift_mlp, scale_mlp)))
        text, tokens = parted(x, (text.shape[1], tokens.shape[1]))
        return tokens, text, modulation


class Head(nn.Module):
    """The stream to a prediction [b, n, p*p*c_out]."""

    def __init__(self, config: JointDiTConfig, output_channels: int) -> None:
        super().__init__()
        hidden, _, _, patch = config.shape
        self.out = nn.Linear(hidden, patch * patch * output_channels)

    def forward(self, stream: Stream, side: SideInputs) -> Float[Tensor, "b n d"]:
        """The last adaLN and the output layer; the caption's tokens end here."""
        tokens, modulation = predicted(stream[0], side), stream[2]
        own = modulation[:, 6 * tokens.shape[-1] :].to(tokens.dtype)
        shift, scale = own[:, None].chunk(2, -1)
        prediction: Tensor = self.out(modulate(tokens, shift, scale))
        return prediction


class JointDiT(CaptionedNetwork):
    """The whole network."""

    embed_class, head_class = Embed, Head
    block_classes: ClassVar = {"": Block}
