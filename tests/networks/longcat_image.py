"""LongCat-Image as a third network: the model file and its section (docs/adding/model.md).

Double blocks, then single ones, as FLUX.1 (arXiv:2403.03206): each block has a modulation of its
own, its layers have biases, its MLP is GELU. As diffusers' `LongCatImageTransformer2DModel`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from titan_dit.config.section import Dim, Few, Layers
from titan_dit.models.layers import (
    MLP,
    Attention,
    JoinedRotary,
    TimestepEmbedder,
    TokenLinear,
    gelu,
    joined,
    modulate,
    parted,
    rotary_on_axes,
    scaled_add,
)
from titan_dit.models.text_to_image import CaptionedNetwork
from titan_dit.models.text_to_image_config import TextToImageConfig

PERIOD = 10_000.0


@dataclass(frozen=True, kw_only=True)
class LongCatConfig(TextToImageConfig):
    """The [model] section."""

    name = "longcat_image"

    hidden_size: Dim
    num_double_layers: Layers
    num_single_layers: Layers
    num_heads: Few
    in_channels: Few = 16
    text_tokens: Dim = 512
    text_dim: Dim = 3584
    rope_axes: tuple[Few, ...] = (16, 56, 56)

    def __post_init__(self):
        super().__post_init__()
        self.check_latent_size()

    @property
    def shape(self):
        return self.hidden_size, len(self.kinds), self.num_heads, 2

    @property
    def ffn(self):
        return 4 * self.hidden_size

    @property
    def kinds(self):
        return *("double",) * self.num_double_layers, *("single",) * self.num_single_layers

    @property
    def condition(self):
        return "condition", self.hidden_size

    def flops(self, output_channels, text_tokens, tokens) -> Mapping[str, int]:
        h, attended = self.hidden_size, text_tokens + tokens
        block = 6 * attended * (4 * h * h + 2 * h * self.ffn) + 12 * attended**2 * h
        inputs = 4 * h * (tokens * 4 * self.in_channels + text_tokens * self.text_dim)
        return {
            "embed": inputs + 1024 * h + 6 * h * h,
            "double": block + 6 * 12 * h * h,
            "single": block + 6 * 3 * h * h,
            "head": 6 * tokens * h * 4 * output_channels + 6 * 2 * h * h,
        }

    def build(self, output_channels):
        return LongCat(self, output_channels)

    def static(self, device):
        """Positions (0, i, i) of the caption, (1, m + row, m + column) of the picture."""
        index = torch.arange(self.text_tokens, device=device)
        rows, columns = (len(index) + torch.arange(side, device=device) for side in self.grid)
        text = torch.stack((torch.zeros_like(index), index, index), -1)
        image = torch.cartesian_prod(torch.ones(1, dtype=torch.int64, device=device), rows, columns)
        found = {"text_rotary": text, "rotary": image}
        return {
            name: rotary_on_axes(positions, self.rope_axes, PERIOD, torch.float64)
            for name, positions in found.items()
        }


class Embed(nn.Module):
    def __init__(self, config):
        super().__init__()
        hidden = config.hidden_size
        self.patch = nn.Linear(4 * config.in_channels, hidden)
        self.text = nn.Linear(config.text_dim, hidden)
        self.timestep = TimestepEmbedder(hidden)

    def forward(self, inputs, side):
        dtype = self.patch.weight.dtype
        condition = F.silu(self.timestep(inputs["timestep"]))
        exact = condition.to(torch.promote_types(dtype, torch.float32))
        return self.patch(inputs["tokens"].to(dtype)), self.text(inputs["text"].to(dtype)), exact


def parts_of(modulation, condition, x, count):
    return modulation(condition.to(x.dtype))[:, None].chunk(count, -1)


class Half(nn.Module):
    """The layers of a double block for the tokens of one kind."""

    def __init__(self, config):
        super().__init__()
        hidden = config.hidden_size
        self.modulation = nn.Linear(hidden, 6 * hidden)
        self.rotary = JoinedRotary()
        self.attn = Attention(hidden, config.num_heads, qk_norm=True, pairs="neighbours")
        self.mlp = MLP(hidden, config.ffn)

    def heads(self, x, parts, angles):
        return self.attn.heads(modulate(x, parts[0], parts[1]), self.rotary(angles))

    def update(self, x, parts, attended):
        _, _, gate_attn, shift_mlp, scale_mlp, gate_mlp = parts
        x = scaled_add(x, gate_attn, self.attn.out(attended))
        return scaled_add(x, gate_mlp, self.mlp(modulate(x, shift_mlp, scale_mlp)))


class DoubleBlock(nn.Module):
    kind: ClassVar[str] = "double"

    def __init__(self, config):
        super().__init__()
        self.image, self.text = Half(config), Half(config)

    def forward(self, stream, side):
        tokens, text, condition = stream
        of_image = parts_of(self.image.modulation, condition, tokens, 6)
        of_text = parts_of(self.text.modulation, condition, text, 6)
        texts = self.text.heads(text, of_text, side["text_rotary"])
        images = self.image.heads(tokens, of_image, side["rotary"])
        q, k, v = (torch.cat(pair, 2) for pair in zip(texts, images, strict=True))
        attended = self.image.attn.mixed(q, k, v, len(tokens))
        text_attended, image_attended = parted(attended, (texts[0].shape[2], images[0].shape[2]))
        text = self.text.update(text, of_text, text_attended)
        return self.image.update(tokens, of_image, image_attended), text, condition


class SingleBlock(nn.Module):
    kind: ClassVar[str] = "single"

    def __init__(self, config):
        super().__init__()
        hidden = config.hidden_size
        self.modulation = nn.Linear(hidden, 3 * hidden)
        self.rotary = JoinedRotary()
        self.attn = Attention(hidden, config.num_heads, qk_norm=True, pairs="neighbours")
        self.up, self.down = TokenLinear(hidden, config.ffn), TokenLinear(config.ffn, hidden, False)

    def forward(self, stream, side):
        tokens, text, condition = stream
        x = joined(text, tokens)
        shift, scale, gate = parts_of(self.modulation, condition, x, 3)
        y = modulate(x, shift, scale)
        attended = self.attn(y, rotary=self.rotary(side["text_rotary"], side["rotary"]))
        x = scaled_add(x, gate, attended + self.down(gelu(self.up(y))))
        text, tokens = parted(x, (text.shape[1], tokens.shape[1]))
        return tokens, text, condition


class Head(nn.Module):
    def __init__(self, config, output_channels):
        super().__init__()
        self.modulation = nn.Linear(config.hidden_size, 2 * config.hidden_size)
        self.out = nn.Linear(config.hidden_size, 4 * output_channels)

    def forward(self, stream, side):
        tokens, _, condition = stream
        scale, shift = parts_of(self.modulation, condition, tokens, 2)
        return self.out(modulate(tokens, shift, scale))


class LongCat(CaptionedNetwork):
    embed_class, head_class = Embed, Head
    block_classes: ClassVar = {"double": DoubleBlock, "single": SingleBlock}
