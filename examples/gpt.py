"""A GPT on the bytes of a file, from outside the package: model, objective, data and tensor plan.

./run_train.sh --config examples/gpt.toml
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as tp

from titan_dit.config.section import Named, PositiveInt
from titan_dit.data.base import Batch, DataConfig, DataFacts, Field, Fields, Source
from titan_dit.models.base import Model, ModelSpec, SideInputs, Stream, TensorSpec
from titan_dit.models.layers import MLP, Attention
from titan_dit.objectives.base import Objective, ObjectiveConfig, Prepared, at_least_fp32
from titan_dit.parallel.tensor import Replicated, TensorPlan
from titan_dit.rng import SampleRNG


@dataclass(frozen=True, kw_only=True)
class GPTConfig(Named):
    """A decoder with learned positions."""

    section, vocab = "model", 256
    hidden_size: PositiveInt
    num_layers: PositiveInt
    num_heads: PositiveInt
    context: PositiveInt

    def spec(self) -> ModelSpec:
        """Token ids in, logits out, causal attention."""
        n, h = self.context, self.hidden_size
        return ModelSpec(
            build=lambda: GPT(self),
            inputs={"tokens": TensorSpec((n,), token_dim=0, dtype=torch.int64)},
            stream={"hidden": TensorSpec((n, h), token_dim=0)},
            predictions={"logits": TensorSpec((n, self.vocab), token_dim=0)},
            static={"positions": TensorSpec((n,), token_dim=0, dtype=torch.int64)},
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            head_dim=h // self.num_heads,
            ffn=4 * h,
            num_tokens=n,
            mask="causal",
        )


class Embed(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocab, config.hidden_size)
        self.position = nn.Embedding(config.context, config.hidden_size)

    def forward(self, inputs: Mapping[str, Tensor], side: SideInputs) -> Stream:
        return (self.token(inputs["tokens"]) + self.position(side["positions"]),)


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        h = config.hidden_size
        self.attn_norm, self.mlp_norm = nn.RMSNorm(h), nn.RMSNorm(h)
        self.attn = Attention(h, config.num_heads, mask="causal")
        self.mlp = MLP(h, 4 * h)

    def forward(self, stream: Stream, side: SideInputs) -> Stream:
        x = stream[0] + self.attn(self.attn_norm(stream[0]))
        return (x + self.mlp(self.mlp_norm(x)),)


class Head(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.hidden_size)
        self.out = nn.Linear(config.hidden_size, config.vocab, bias=False)

    def forward(self, stream: Stream, side: SideInputs) -> Stream:
        return (self.out(self.norm(stream[0])),)


class GPT(Model):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.embed, self.head = Embed(config), Head(config)
        self.blocks = nn.ModuleDict({str(i): Block(config) for i in range(config.num_layers)})


@dataclass(frozen=True, kw_only=True)
class NextToken(ObjectiveConfig, Objective):
    """Next-token cross-entropy."""

    takes = ("text",)
    token_targets = ("next",)

    def prepare(self, batch: Batch, rng: SampleRNG) -> Prepared:
        text = batch.fields["text"].long()
        n = text.shape[1] - 1
        static = {"positions": torch.arange(n, device=text.device)}
        inputs, targets = {"tokens": text[:, :-1]}, {"next": text[:, 1:]}
        return Prepared(inputs, targets, batch.weight, batch.total_weight * n, static)

    def loss(self, predictions: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> Tensor:
        logits = at_least_fp32(predictions["logits"]).transpose(1, 2)
        return F.cross_entropy(logits, targets["next"], reduction="none")

    def describe(self, fields: Fields, rng: SampleRNG) -> dict[str, Tensor]:
        return {"first_byte": fields["text"][:, 0]} if fields else {}


@dataclass(frozen=True, kw_only=True)
class Text(DataConfig):
    """The bytes of a file in windows that overlap by one byte."""

    path: str
    context: PositiveInt

    def open(self) -> Source:
        return Windows(Path(self.path).read_bytes(), self.context)


class Windows(Source):
    def __init__(self, text: bytes, n: int) -> None:
        self.text, self.n = torch.frombuffer(bytearray(text), dtype=torch.uint8), n
        self.fields = {"text": Field(torch.uint8, (n + 1,))}
        digest = f"{hashlib.sha256(text).hexdigest()}/{n}"
        self.facts = DataFacts(count=(len(text) - 1) // n, digest=digest)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"text": self.text[index * self.n :][: self.n + 1]}


def plan(sequence_parallel: bool) -> TensorPlan:
    """Megatron's plan: attention sharded by heads, the MLP by its width, the rest replicated."""
    own = Shard(1) if sequence_parallel else Replicate()
    norm = tp.SequenceParallel() if sequence_parallel else Replicated()
    gather = tp.PrepareModuleInput(input_layouts=own, desired_input_layouts=Replicate())
    columns, rows = tp.ColwiseParallel(), tp.RowwiseParallel(output_layouts=own)
    block: dict[str, tp.ParallelStyle] = {"attn_norm": norm, "mlp_norm": norm, "attn": gather}
    block |= {"mlp": gather, "attn.qkv": columns, "mlp.up": columns}
    block |= {"attn.out": rows, "mlp.down": rows}
    embed, head = (
        {"token": Replicated(), "position": Replicated()},
        {"norm": Replicated(), "out": Replicated()},
    )
    return TensorPlan((own if sequence_parallel else None,), embed, block, head)
