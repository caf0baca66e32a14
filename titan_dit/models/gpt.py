"""GPT-2: Language Models are Unsupervised Multitask Learners (Radford 2019), and what came after.

Pre-norm blocks with causal attention. Keys turn it into a Llama: rotary positions, RMSNorm, SwiGLU,
grouped queries, no biases, an output layer of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from jaxtyping import Float
from torch import Tensor, nn

from titan_dit.models import initializers
from titan_dit.models.base import Model, SideInputs, Stream
from titan_dit.models.gpt_config import GPTConfig
from titan_dit.models.initializers import Initializer
from titan_dit.models.layers import MLP, Attention, GatedMLP
from titan_dit.models.sample_dropout import SampleDropout, dropped
from titan_dit.models.vocabulary import Vocabulary


def norm_of(config: GPTConfig) -> nn.Module:
    """A norm over `hidden`."""
    kind = nn.LayerNorm if config.norm == "layernorm" else nn.RMSNorm
    return kind(config.shape[0], eps=config.norm_eps)


def dropout_of(config: GPTConfig, layer: int, place: int = 0) -> SampleDropout | None:
    """The dropout at a place of a layer; None if the rate is 0."""
    return SampleDropout(config.dropout, layer, place) if config.dropout else None


class Embed(nn.Module):
    """Token ids to the stream [b, n, d]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        hidden = config.shape[0]
        self.token = nn.Embedding(config.rows, hidden)
        self.is_learned = config.position_embedding_type == "learned"
        # The tensor plan names `position` in both cases.
        table = nn.Embedding(config.sequence_length, hidden) if self.is_learned else nn.Identity()
        self.position: nn.Module = table
        self.dropout = dropout_of(config, config.shape[1])

    def forward(self, inputs: Mapping[str, Tensor], side: SideInputs) -> Stream:
        """`tokens` [b, n] int64."""
        x = self.token(inputs["tokens"])
        if self.is_learned:
            x = x + self.position(side["positions"])
        return (dropped(self.dropout, x, side),)


class Block(nn.Module):
    """Attention and MLP, each after a norm and added to the stream."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        hidden, _, heads = config.shape
        groups, bias = config.num_key_value_heads, config.bias
        self.attn_norm = norm_of(config)
        self.attn = Attention(hidden, heads, mask="causal", num_key_value_heads=groups, bias=bias)
        self.attn_dropout = dropout_of(config, layer, 0)
        self.mlp_norm = norm_of(config)
        kind = MLP if config.mlp == "gelu" else GatedMLP
        self.mlp = kind(hidden, config.width, bias)
        self.mlp_dropout = dropout_of(config, layer, 1)

    def forward(self, stream: Stream, side: SideInputs) -> Stream:
        """The stream after attention and MLP."""
        (x,) = stream
        rotary = (side["cos"], side["sin"]) if "cos" in side else None
        attended = self.attn(self.attn_norm(x), rotary=rotary)
        x = x + dropped(self.attn_dropout, attended, side)
        return (x + dropped(self.mlp_dropout, self.mlp(self.mlp_norm(x)), side),)


class Head(nn.Module):
    """The stream to the loss per token [b, n], or without next tokens to logits [b, n, size]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm = norm_of(config)
        self.out = nn.Linear(config.shape[0], config.rows, bias=False)
        self.vocabulary = Vocabulary(config.vocab_size, config.rows)

    def forward(self, stream: Stream, side: SideInputs) -> Float[Tensor, "b n *size"]:
        """The loss needs `next_tokens` [b, n] in `side`."""
        logits = self.out(self.norm(stream[0]))
        result: Tensor = self.vocabulary(logits, side.get("next_tokens"))
        return result


class GPT(Model):
    """The whole network."""

    embed: Embed
    head: Head

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = Embed(config)
        layers = config.shape[1]
        self.blocks = nn.ModuleDict({str(i): Block(config, i) for i in range(layers)})
        self.head = Head(config)
        if config.tie_word_embeddings:
            self.tied = {"head.out.weight": "embed.token.weight"}
        self.tie()

    def initializers(self) -> dict[str, Initializer]:
        """N(0, init_std), smaller for residual projections (Radford 2019 sec. 2.3)."""
        std, layers = self.config.init_std, self.config.shape[1]
        table = super().initializers()
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                table[name] = initializers.zeros
            elif parameter.ndim == 1:
                table[name] = initializers.ones
            elif name.endswith(("attn.out.weight", "mlp.down.weight")):
                table[name] = initializers.normal(std / math.sqrt(2 * layers))
            else:
                table[name] = initializers.normal(std)
        return table

    def flops_per_sample(self, tokens: int) -> int:
        """FLOPs of forward and backward per sample: 2 per multiply-add of a matmul, no recompute.

        As Megatron counts (arXiv:2104.04473 eq. 3): attention in full, although half is masked.
        """
        head = 6 * tokens * self.config.shape[0] * self.config.rows
        return self.config.shape[1] * self.config.block_flops(tokens) + head
