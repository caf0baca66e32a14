"""A user's decoder: grouped queries, rotary positions and hidden dropout at three places."""

from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from examples.gpt import Block, Embed, GPTConfig, NextToken
from examples.gpt import plan as gpt
from titan_dit.models.base import Model, ModelSpec, TensorSpec
from titan_dit.models.layers import Attention, rotary_of
from titan_dit.models.sample_dropout import SampleDropout
from titan_dit.parallel.tensor import TokenFirst


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(GPTConfig):
    groups: int = 0
    dropout: float = 0.2

    def spec(self) -> ModelSpec:
        return replace(
            super().spec(),
            build=lambda: Decoder(self),
            context={"keys": TensorSpec((), dtype=torch.int64)},
            num_key_value_heads=self.groups,
        )


class DecoderEmbed(Embed):
    def __init__(self, config):
        super().__init__(config)
        self.dropout = SampleDropout(config.dropout, config.num_layers)

    def forward(self, inputs, side):
        (x,) = super().forward(inputs, side)
        return (self.dropout(x, side["keys"], side["positions"]),)


class DecoderBlock(Block):
    def __init__(self, config, layer):
        super().__init__(config)
        heads = {"mask": "causal", "qk_norm": False, "num_key_value_heads": config.groups}
        self.attn = Attention(config.hidden_size, config.num_heads, **heads)
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
        self.norm = nn.RMSNorm(config.hidden_size)
        self.out = nn.Linear(config.hidden_size, config.vocab, bias=False)

    def forward(self, stream, side):
        return (self.out(self.norm(stream[0])),)


class Decoder(Model):
    def __init__(self, config):
        super().__init__()
        self.embed, self.head = DecoderEmbed(config), DecoderHead(config)
        blocks = (DecoderBlock(config, layer) for layer in range(config.num_layers))
        self.blocks = nn.ModuleDict({str(layer): block for layer, block in enumerate(blocks)})


def plan(sequence_parallel):
    """The plan of examples/gpt.py; sharded tokens lie as [n, b, d] in memory."""
    found = gpt(sequence_parallel)
    if not sequence_parallel:
        return found
    columns, rows = (
        ColwiseParallel(input_layouts=Shard(0)),
        RowwiseParallel(output_layouts=Shard(0)),
    )
    norms = {name: found.block[name] for name in ("attn_norm", "mlp_norm")}
    up = dict.fromkeys(("attn.qkv", "mlp.up"), TokenFirst(columns))
    down = dict.fromkeys(("attn.out", "mlp.down"), TokenFirst(rows))
    return replace(found, block=norms | up | down, token_first=True)


@dataclass(frozen=True, kw_only=True)
class Dropped(NextToken):
    def prepare(self, batch, rng):
        return replace(super().prepare(batch, rng), context={"keys": rng.keys("dropout")})
