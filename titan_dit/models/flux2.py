"""FLUX.2: double blocks, then single ones (MM-DiT, arXiv:2403.03206), as `Flux2Transformer2DModel`.

A double block has weights of its own for caption and picture, which attend to each other. A single
block has the same weights for both, and attention and MLP side by side (ViT-22B, arXiv:2302.05442).
adaLN by the time: shifts, scales and gates are computed once and shared by all blocks of a kind.
Queries and keys are RMS-normalised and rotated by (picture, row, column, text index), neighbouring
channels together (arXiv:2104.09864). MLPs are SwiGLU; no layer has a bias.

A caption has `text_tokens` tokens, all of them attended to: its padding is what the text encoder
makes of it. Time and prediction are those of [objective] direction = "to_noise".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from titan_dit.models.base import SideInputs, Stream
from titan_dit.models.flux2_config import MODULATION, Flux2Config
from titan_dit.models.layers import (
    Attention,
    GatedMLP,
    JoinedRotary,
    Junction,
    Rotary,
    TimestepEmbedder,
    condition_projection,
    joined,
    modulate,
    parted,
    scaled_add,
)
from titan_dit.models.text_to_image import (
    CaptionedNetwork,
    embedded_tokens,
    image_rotary,
    predicted,
)


class Embed(nn.Module):
    """Inputs to the stream: picture [b, n, d], caption [b, m, d] and modulation [b, 17 d]."""

    reads: ClassVar = {"text": ("text",)}

    def __init__(self, config: Flux2Config) -> None:
        super().__init__()
        hidden = config.shape[0]
        self.patch = nn.Linear(config.in_channels, hidden, bias=False)
        self.condition = condition_projection(config.condition_channels, 1, hidden)
        self.text = nn.Linear(config.text_dim, hidden, bias=False)
        self.timestep = TimestepEmbedder(hidden, bias=False)
        self.scale = config.guidance
        # The tensor plan names its layers in both cases.
        absent = nn.ModuleDict({"up": nn.Identity(), "down": nn.Identity()})
        has_guidance = config.guidance is not None
        self.guidance = TimestepEmbedder(hidden, bias=False) if has_guidance else absent
        self.modulation = nn.ModuleDict(
            {name: nn.Linear(hidden, parts * hidden, False) for name, parts in MODULATION.items()}
        )

    def forward(self, inputs: Mapping[str, Tensor], side: SideInputs) -> Stream:
        """`tokens` [b, n, c], `timestep` [b] in 0..1000, `text` [b, m, e].

        With condition channels `condition` [b, n, k]; with reference tokens `reference` [b, n, c].
        """
        timestep, dtype = inputs["timestep"], self.patch.weight.dtype
        embedding = self.timestep(timestep)
        if self.scale is not None:
            # In the unit of the time.
            embedding = embedding + self.guidance(torch.full_like(timestep, 1000 * self.scale))
        embedding = F.silu(embedding)
        modulation = torch.cat([part(embedding) for part in self.modulation.values()], -1)
        # At least fp32: its gradient is a sum over all blocks.
        exact = modulation.to(torch.promote_types(modulation.dtype, torch.float32))
        return embedded_tokens(self, inputs), self.text(inputs["text"].to(dtype)), exact


class SharedModulation(nn.Module):
    """A part of the modulation that all blocks share."""

    def __init__(self, config: Flux2Config, name: str) -> None:
        super().__init__()
        self.first, self.width = config.part_of_modulation(name)

    def forward(self, shared: Float[Tensor, "b _"]) -> Float[Tensor, "b _"]:
        """[b, 17 d] to the part [b, k d]."""
        return shared[:, self.first : self.first + self.width]


class Half(nn.Module):
    """The layers of a double block for the tokens of one kind."""

    def __init__(self, config: Flux2Config, name: str) -> None:
        super().__init__()
        hidden, _, heads, _ = config.shape
        self.modulation = SharedModulation(config, name)
        self.rotary = JoinedRotary()
        self.attn = Attention(hidden, heads, qk_norm=True, bias=False, pairs="neighbours")
        self.mlp = GatedMLP(hidden, config.ffn, bias=False)

    def parts(self, x: Tensor, modulation: Tensor) -> tuple[Tensor, ...]:
        """Shift, scale and gate of attention, then of the MLP: each [b, 1, d]."""
        own: Tensor = self.modulation(modulation)
        return own.to(x.dtype)[:, None].chunk(6, -1)

    def heads(self, x: Tensor, parts: tuple[Tensor, ...], angles: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values, each [b, heads, n, head_dim]."""
        return self.attn.heads(modulate(x, parts[0], parts[1]), self.rotary(angles))

    def update(
        self, x: Float[Tensor, "b n d"], parts: tuple[Tensor, ...], attended: Tensor
    ) -> Float[Tensor, "b n d"]:
        """The tokens after attention, whose result is [b, n, d] before `out`, and MLP."""
        _, _, gate_attn, shift_mlp, scale_mlp, gate_mlp = parts
        x = scaled_add(x, gate_attn, self.attn.out(attended))
        return scaled_add(x, gate_mlp, self.mlp(modulate(x, shift_mlp, scale_mlp)))


class DoubleBlock(nn.Module):
    """Caption and picture attend to each other, with weights of their own."""

    kind: ClassVar[str] = "double"
    reads: ClassVar = {"text.*": ("text",)}

    def __init__(self, config: Flux2Config) -> None:
        super().__init__()
        self.image, self.text = Half(config, "image"), Half(config, "text")

    def forward(self, stream: Stream, side: SideInputs) -> Stream:
        """Update the tokens; the modulation passes through."""
        tokens, text, modulation = stream
        of_image = self.image.parts(tokens, modulation)
        of_text = self.text.parts(text, modulation)
        texts = self.text.heads(text, of_text, side["text_rotary"])
        images = self.image.heads(tokens, of_image, image_rotary(side))
        q, k, v = (
            torch.cat([part.transpose(1, 2) for part in pair], 1).transpose(1, 2)
            for pair in zip(texts, images, strict=True)
        )
        # Either half's attention would do: it has no weights.
        attended = self.image.attn.mixed(q, k, v, len(tokens))
        sizes = texts[0].shape[2], images[0].shape[2]
        text_attended, image_attended = parted(attended, sizes)
        text = self.text.update(text, of_text, text_attended)
        return self.image.update(tokens, of_image, image_attended), text, modulation


class SingleBlock(nn.Module):
    """Attention and MLP side by side, on the tokens of caption and picture alike."""

    kind: ClassVar[str] = "single"
    reads: ClassVar = {"*": ("text", "tokens")}

    def __init__(self, config: Flux2Config) -> None:
        super().__init__()
        hidden, _, heads, _ = config.shape
        self.modulation = SharedModulation(config, "single")
        self.rotary = JoinedRotary()
        self.read, self.summed = Junction(), Junction()
        self.attn = Attention(hidden, heads, qk_norm=True, bias=False, pairs="neighbours")
        self.mlp = GatedMLP(hidden, config.ffn, bias=False)

    def forward(self, stream: Stream, side: SideInputs) -> Stream:
        """Update the tokens; the modulation passes through."""
        tokens, text, modulation = stream
        x = joined(text, tokens)
        shift, scale, gate = self.modulation(modulation).to(x.dtype)[:, None].chunk(3, -1)
        rotary: Rotary = self.rotary(side["text_rotary"], image_rotary(side))
        y = self.read(modulate(x, shift, scale))
        x = scaled_add(x, gate, self.summed(self.attn(y, rotary=rotary) + self.mlp(y)))
        text, tokens = parted(x, (text.shape[1], tokens.shape[1]))
        return tokens, text, modulation


class Head(nn.Module):
    """The stream to a prediction [b, n, c_out]."""

    def __init__(self, config: Flux2Config, output_channels: int) -> None:
        super().__init__()
        self.modulation = SharedModulation(config, "head")
        self.out = nn.Linear(config.shape[0], output_channels, bias=False)

    def forward(self, stream: Stream, side: SideInputs) -> Float[Tensor, "b n d"]:
        """The last adaLN and the output layer; the caption's tokens end here."""
        tokens, modulation = predicted(stream[0], side), stream[2]
        scale, shift = self.modulation(modulation).to(tokens.dtype)[:, None].chunk(2, -1)
        prediction: Tensor = self.out(modulate(tokens, shift, scale))
        return prediction


class Flux2(CaptionedNetwork):
    """The whole network."""

    embed_class, head_class = Embed, Head
    block_classes: ClassVar = {"double": DoubleBlock, "single": SingleBlock}
