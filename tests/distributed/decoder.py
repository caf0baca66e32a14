"""A user's decoder: grouped queries, rotary positions and hidden dropout at three places."""

from dataclasses import dataclass, replace

from torch import nn

from examples.gpt import Block, Embed, GPTConfig, NextToken
from titan_dit.models.base import Model, ModelSpec, TensorSpec
from titan_dit.models.layers import Attention
from titan_dit.models.rotary import rotary_of
from titan_dit.models.sample_dropout import SampleDropout


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(GPTConfig):
    groups: int = 0
    dropout: float = 0.2

    def spec(self) -> ModelSpec:
        import torch

        return replace(
            super().spec(),
            build=lambda: Decoder(self),
            context={"keys": TensorSpec((), dtype=torch.int64)},
            query_groups=self.groups,
        )


class DecoderEmbed(Embed):
    def __init__(self, config):
        super().__init__(config)
        self.dropout = SampleDropout(config.dropout, config.layers)

    def forward(self, inputs, side):
        (x,) = super().forward(inputs, side)
        return (self.dropout(x, side["keys"], side["positions"]),)


class DecoderBlock(Block):
    def __init__(self, config, layer):
        super().__init__(config)
        heads = {"mask": "causal", "qk_norm": False, "query_groups": config.groups}
        self.attn = Attention(config.hidden, config.heads, **heads)
        self.after_attn, self.after_mlp = (
            SampleDropout(config.dropout, layer, place) for place in (0, 1)
        )

    def forward(self, stream, side):
        drawn = side["keys"], side["positions"]
        rotary = rotary_of(side["positions"], self.attn.head_dim)
        x = stream[0]
        x = x + self.after_attn(self.attn(self.attn_norm(x), rotary=rotary), *drawn)
        return (x + self.after_mlp(self.mlp(self.mlp_norm(x)), *drawn),)


class DecoderHead(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm = nn.RMSNorm(config.hidden)
        self.out = nn.Linear(config.hidden, config.vocab, bias=False)

    def forward(self, stream, side):
        return (self.out(self.norm(stream[0])),)


class Decoder(Model):
    def __init__(self, config):
        super().__init__()
        self.embed, self.head = DecoderEmbed(config), DecoderHead(config)
        blocks = (DecoderBlock(config, layer) for layer in range(config.layers))
        self.blocks = nn.ModuleDict({str(layer): block for layer, block in enumerate(blocks)})


@dataclass(frozen=True, kw_only=True)
class Dropped(NextToken):
    def prepare(self, batch, rng):
        return replace(super().prepare(batch, rng), context={"keys": rng.keys("dropout")})
