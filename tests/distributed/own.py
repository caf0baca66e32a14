"""A user's own model, objective and data that use every feature of the interfaces.

The model masks by lengths, takes a whole and a sliced context, and returns two predictions. Its
objective weights every token, knows no total, and has a trainable uncertainty.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.gpt import Block, Embed, GPTConfig, NextToken, Text, Windows
from titan_dit.data.base import Field
from titan_dit.models import initializers
from titan_dit.models.base import Model, ModelSpec, SideInputs, Stream, TensorSpec
from titan_dit.models.layers import Attention
from titan_dit.objectives.base import Prepared, at_least_fp32
from titan_dit.parallel.tensor import Replicated, TensorPlan


@dataclass(frozen=True, kw_only=True)
class OwnConfig(GPTConfig):
    def spec(self) -> ModelSpec:
        n, h, whole = self.context, self.hidden_size, super().spec()
        return ModelSpec(
            **vars(whole)
            | {
                "build": lambda: Own(self),
                # A second stream tensor, with another dtype and without tokens.
                "stream": {
                    "hidden": TensorSpec((n, h), token_dim=0),
                    "summary": TensorSpec((h,), dtype=torch.float32),
                },
                "predictions": {
                    "logits": TensorSpec((n, self.vocab), token_dim=0),
                    "length": TensorSpec((n, 1), token_dim=0),
                },
                "context": {
                    "lengths": TensorSpec((), dtype=torch.int64),
                    "inside": TensorSpec((n, 1), token_dim=0, dtype=torch.float32),
                },
                "mask": "lengths",
            }
        )


class OwnEmbed(Embed):
    def forward(self, inputs: Mapping[str, Tensor], side: SideInputs) -> Stream:
        (x,) = super().forward(inputs, side)
        return x, self.position(side["lengths"] - 1).float()


class OwnBlock(Block):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.attn = Attention(config.hidden_size, config.num_heads, mask="lengths")

    def forward(self, stream: Stream, side: SideInputs) -> Stream:
        x, summary = stream
        x = x + self.attn(self.attn_norm(x), lengths=side["lengths"])
        return x + self.mlp(self.mlp_norm(x)), summary


class OwnHead(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.out = nn.Linear(config.hidden_size, config.vocab, bias=False)
        self.length = nn.Linear(config.hidden_size, 1)

    def forward(self, stream: Stream, side: SideInputs) -> Stream:
        x, summary = stream
        x = (x + summary[:, None].to(x.dtype)) * side["inside"].to(x.dtype)
        return self.out(x), self.length(x)


class Own(Model):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.embed, self.head = OwnEmbed(config), OwnHead(config)
        self.blocks = nn.ModuleDict({str(i): OwnBlock(config) for i in range(config.num_layers)})


@dataclass(frozen=True, kw_only=True)
class OwnData(Text):
    def open(self):
        return WithLengths(super().open())


class WithLengths(Windows):
    """Sample i has i % n + 1 tokens, and the rest of its window is padding."""

    def __init__(self, source):
        self.__dict__.update(vars(source))
        self.fields = source.fields | {"length": Field(torch.int64, ())}

    def __getitem__(self, index):
        return super().__getitem__(index) | {"length": torch.tensor(index % self.n + 1)}


@dataclass(frozen=True, kw_only=True)
class OwnObjective(NextToken):
    takes = ("text", "length")
    token_targets = ("next",)

    def build(self, model, facts):
        return Uncertain(self)


class Uncertain(NextToken):
    """Random weights for tokens, 0 for padding."""

    takes = ("text", "length")
    token_targets = ("next",)

    def __init__(self, config):
        self.__dict__.update(vars(config))
        with torch.device("meta"):
            self.__dict__["own"] = nn.ModuleDict({"uncertainty": nn.Embedding(256, 1)})

    def modules(self):
        return self.own

    def initializers(self):
        return {"uncertainty.weight": initializers.normal(0.5)}

    def prepare(self, batch, rng) -> Prepared:
        plain = super().prepare(batch, rng)
        n, lengths = plain.inputs["tokens"].shape[1], batch.fields["length"]
        inside = torch.arange(n, device=lengths.device) < lengths[:, None]
        weight = inside * (0.5 + rng.uniform("weight", (n,))) * batch.weight[:, None]
        return Prepared(
            inputs=plain.inputs,
            targets=plain.targets | {"length": lengths},
            weight=weight,
            total_tokens=None,
            static=plain.static,
            context={"lengths": lengths, "inside": inside[..., None].float()},
        )

    def loss(self, predictions, targets):
        logits = at_least_fp32(predictions["logits"]).transpose(1, 2)
        surprise = F.cross_entropy(logits, targets["next"], reduction="none")
        length = at_least_fp32(predictions["length"])[..., 0]
        wrong = (length - targets["length"][:, None] / 8).square()
        spread = self.own["uncertainty"](targets["next"])[..., 0]
        return surprise * torch.exp(-spread) + spread + wrong


def plan(sequence_parallel: bool) -> TensorPlan:
    from torch.distributed.tensor import Replicate

    from examples.gpt import plan as gpt

    found = gpt(sequence_parallel)
    embed = {"token": Replicated(), "position": Replicated()}
    return TensorPlan(
        (*found.stream, Replicate()),
        embed,
        found.block,
        {"out": Replicated(), "length": Replicated()},
    )
