"""BERT: Pre-training of Deep Bidirectional Transformers (arXiv:1810.04805).

With LayerNorms where BERT has them, or where Megatron has them (arXiv:1909.08053 sec. 5.3).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from titan_dit.models import initializers
from titan_dit.models.base import Mask, Model, SideInputs, Stream
from titan_dit.models.bert_config import BERTConfig
from titan_dit.models.initializers import Initializer
from titan_dit.models.layers import MLP, Attention
from titan_dit.models.sample_dropout import SampleDropout, dropped
from titan_dit.models.vocabulary import Vocabulary, cross_entropy


@dataclass(frozen=True)
class Task:
    """The training tasks of a BERT."""

    num_scored: int
    """Maximum masked tokens of a sample; the head computes the losses of these only."""
    sentence_order: bool = False
    """Train the second task, too: are a sample's two spans in order? Its samples are padded."""

    @property
    def mask(self) -> Mask:
        """Attention mask: "lengths" if samples are padded, so that no query attends to padding."""
        return "lengths" if self.sentence_order else "none"


def norm_of(config: BERTConfig) -> nn.LayerNorm:
    """A LayerNorm over `hidden`."""
    return nn.LayerNorm(config.shape[0], eps=config.norm_eps)


def dropout_of(config: BERTConfig, layer: int, place: int = 0) -> SampleDropout | None:
    """The dropout at a place of a layer; None if the rate is 0."""
    return SampleDropout(config.dropout, layer, place) if config.dropout else None


class ExactMLP(MLP):
    """Two layers with GELU in its exact form, by erf."""

    def forward(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        """Apply the MLP to every token."""
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y


class Embed(nn.Module):
    """Token ids and types to the stream [b, n, d]."""

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        hidden = config.shape[0]
        self.token = nn.Embedding(config.rows, hidden)
        self.position = nn.Embedding(config.sequence_length, hidden)
        self.token_type = nn.Embedding(2, hidden)
        self.norm = norm_of(config) if config.norm_place == "post" else nn.Identity()
        self.dropout = dropout_of(config, config.shape[1])

    def forward(self, inputs: Mapping[str, Tensor], side: SideInputs) -> Stream:
        """`tokens` [b, n] int64; `types` [b, n] int64: 0 in the first span, 1 in the second."""
        x = self.token(inputs["tokens"]) + self.position(side["positions"])
        x = self.norm(x + self.token_type(inputs["types"]))
        return (dropped(self.dropout, x, side),)


class Block(nn.Module):
    """Attention and MLP, each added to the stream, with a norm after or before."""

    def __init__(self, config: BERTConfig, mask: Mask, layer: int) -> None:
        super().__init__()
        hidden, _, heads = config.shape
        self.is_post = config.norm_place == "post"
        self.attn = Attention(hidden, heads, mask=mask)
        self.attn_dropout = dropout_of(config, layer, 0)
        self.attn_norm = norm_of(config)
        self.mlp = ExactMLP(hidden, config.width)
        self.mlp_dropout = dropout_of(config, layer, 1)
        self.mlp_norm = norm_of(config)

    def forward(self, stream: Stream, side: SideInputs) -> Stream:
        """The stream after attention and MLP."""
        (x,), lengths = stream, side.get("lengths")
        attended = self.attn(x if self.is_post else self.attn_norm(x), lengths=lengths)
        x = x + dropped(self.attn_dropout, attended, side)
        x = self.attn_norm(x) if self.is_post else x
        added = self.mlp(x if self.is_post else self.mlp_norm(x))
        x = x + dropped(self.mlp_dropout, added, side)
        return (self.mlp_norm(x) if self.is_post else x,)


class Head(nn.Module):
    """The stream to the loss per token [b, n], or without labels to logits [b, n, size]."""

    def __init__(self, config: BERTConfig, task: Task) -> None:
        super().__init__()
        hidden = config.shape[0]
        self.num_scored = task.num_scored
        self.norm = norm_of(config) if config.norm_place == "pre" else nn.Identity()
        self.dense = nn.Linear(hidden, hidden)
        self.dense_norm = norm_of(config)
        self.out = nn.Linear(hidden, config.rows)
        self.vocabulary = Vocabulary(config.vocab_size, config.rows)
        self.pooler = nn.Linear(hidden, hidden) if task.sentence_order else nn.Identity()
        self.order = nn.Linear(hidden, 2) if task.sentence_order else nn.Identity()

    def forward(self, stream: Stream, side: SideInputs) -> Float[Tensor, "b n *size"]:
        """The loss per token [b, n] if `side` has `labels`, else the logits [b, n, size].

        `labels` [b, n]: the id of a masked token, else -1; tokens that are not masked have loss 0.
        `order` [b, n], of the second task: at token 0 whether the spans are swapped, 0 or 1; else
        -1. Its loss is added at token 0.
        """
        x = self.norm(stream[0])
        if "labels" not in side:
            return self.scored(x, None)
        losses = self.masked_losses(x, side["labels"])
        if "order" in side:
            label = side["order"][:, 0]
            loss = cross_entropy(self.order_logits(x), label.clamp(min=0), 2)
            # In a cp slice without token 0 the label is -1.
            losses = losses + F.pad(loss.where(label >= 0, 0)[:, None], (0, x.shape[1] - 1))
        return losses

    def masked_losses(self, x: Float[Tensor, "b n d"], labels: Int[Tensor, "b n"]) -> Tensor:
        """The loss of each masked token, else 0. Logits are computed for `num_scored` tokens."""
        # A stable sort has the masked tokens first, in any slice of the tokens.
        places = (labels < 0).byte().argsort(stable=True, dim=1)[:, : self.num_scored]
        targets = labels.gather(1, places)
        chosen = x.gather(1, places[..., None].expand(-1, -1, x.shape[2]))
        losses = self.scored(chosen, targets.clamp(min=0)).where(targets >= 0, 0)
        return losses.new_zeros(labels.shape).scatter(1, places, losses)

    def scored(self, x: Float[Tensor, "b m d"], targets: Tensor | None) -> Tensor:
        """The loss per token [b, m]; without `targets` [b, m] the logits [b, m, vocabulary]."""
        logits = self.out(self.dense_norm(F.gelu(self.dense(x))))
        result: Tensor = self.vocabulary(logits, targets)
        return result

    def order_logits(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b 2"]:
        """Logits (in order, swapped) of the spans, from token 0 of the normed stream."""
        logits: Tensor = self.order(self.pooler(x[:, :1]).tanh())
        return logits[:, 0]


class BERT(Model):
    """The whole network."""

    embed: Embed
    head: Head

    def __init__(self, config: BERTConfig, task: Task) -> None:
        super().__init__()
        self.config, self.task = config, task
        self.embed = Embed(config)
        layers = range(config.shape[1])
        self.blocks = nn.ModuleDict({str(i): Block(config, task.mask, i) for i in layers})
        self.head = Head(config, task)
        self.tied = {"head.out.weight": "embed.token.weight"}
        self.tie()

    def initializers(self) -> dict[str, Initializer]:
        """N(0, init_std); see `BERTConfig.init_std`."""
        std, layers = self.config.init_std, self.config.shape[1]
        table = super().initializers()
        for name, parameter in self.named_parameters():
            writes = name.endswith(("attn.out.weight", "mlp.down.weight"))
            if name.endswith("bias"):
                table[name] = initializers.zeros
            elif parameter.ndim == 1:
                table[name] = initializers.ones
            elif writes and self.config.norm_place == "pre":
                table[name] = initializers.normal(std / math.sqrt(2 * layers))
            else:
                table[name] = initializers.normal(std)
        return table

    def flops_per_sample(self, tokens: int) -> int:
        """FLOPs of forward and backward per sample: 2 per multiply-add of a matmul, no recompute.

        Padding counts as tokens; the head counts for masked tokens only. The head of the second
        task is left out.
        """
        blocks = self.config.shape[1] * self.config.block_flops(tokens)
        return blocks + self.config.head_flops(self.task.num_scored)
