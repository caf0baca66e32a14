"""What the trainer, the layouts and the pipeline need to know of a model, and no more."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn

from titan_dit.models import initializers
from titan_dit.models.initializers import Initializer

Stream: TypeAlias = tuple[Tensor, ...]
"""What flows from embed through the blocks to head: tensors that need gradients, batch first.
It alone travels through a pipeline."""

SideInputs: TypeAlias = Mapping[str, Tensor]
"""What every part is given beside the stream, without gradients: `ModelSpec.context` (batch first)
and `ModelSpec.static` (no batch dim) in one mapping."""

Mask: TypeAlias = Literal["none", "causal", "lengths"]
"""Which keys a query sees: all; those up to its own position; the first of each sample's."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor that a model takes or gives."""

    shape: tuple[int, ...]
    """Without the batch dim."""
    token_dim: int | None = None
    """Which dim of `shape` counts tokens, and is sliced over cp; None: the tensor stays whole."""
    dtype: torch.dtype | None = None
    """None: that of [precision] dtype."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A network before it is built: what it takes and gives, and what the layouts cut."""

    build: Callable[[], Model]
    """The network, on the current default device."""
    inputs: Mapping[str, TensorSpec]
    """What `embed` is given; batch first."""
    stream: Mapping[str, TensorSpec]
    """What flows between the blocks, in this order; batch first."""
    predictions: Mapping[str, TensorSpec]
    """What `head` gives, in this order; batch first."""
    context: Mapping[str, TensorSpec] = field(default_factory=dict)
    """What every pipeline stage is given of each sample, without gradients; batch first."""
    static: Mapping[str, TensorSpec] = field(default_factory=dict)
    """What every stage is given, the same for all samples; no batch dim."""
    num_layers: int
    """Number of blocks."""
    num_heads: int
    """Attention heads of a block."""
    head_dim: int
    """Channels of an attention head."""
    ffn: int
    """Width of a block's MLP."""
    num_tokens: int
    """Tokens of a sample."""
    mask: Mask = "none"
    """What the attention of its blocks is masked by."""
    embed_cost: float = 0.0
    """What embed costs, in blocks: for balancing pipeline stages."""
    head_cost: float = 0.0
    """What head costs, in blocks."""


class Model(nn.Module):
    """A network cut where the layouts cut it.

    `embed` is None off the first pipeline stage and `head` off the last; `blocks` keeps the global
    layer index as its key after the cut.
    """

    embed: nn.Module | None
    """(inputs, side) -> stream."""
    blocks: nn.ModuleDict
    """Each (stream, side) -> stream."""
    head: nn.Module | None
    """(stream, side) -> the predictions in the order of `ModelSpec.predictions`; one alone may
    come without its tuple."""

    def forward(self, given: Mapping[str, Tensor] | Stream, side: SideInputs) -> Tensor | Stream:
        """Inputs of `embed` to a prediction for every token.

        A pipeline stage is given the stream where it has no `embed`, and gives it on where it has
        no `head`.
        """
        stream: Any = given if self.embed is None else self.embed(given, side)
        for block in self.blocks.values():
            stream = block(stream, side)
        out: Tensor | Stream = stream if self.head is None else self.head(stream, side)
        return out

    def cut(self, layers: range, *, is_first: bool, is_last: bool) -> None:
        """Keep the part of one pipeline stage; names stay those of the whole network."""
        kept = {key: block for key, block in self.blocks.items() if int(key) in layers}
        self.blocks = nn.ModuleDict(kept)
        self.embed = self.embed if is_first else None
        self.head = self.head if is_last else None

    def initializers(self) -> dict[str, Initializer]:
        """The initial distribution of every parameter and buffer, by name.

        By default GPT-2's: N(0, 0.02) for matrices, 1 for the weights of norms, 0 for biases.
        """
        tensors = itertools.chain(self.named_parameters(), self.named_buffers())
        return {name: default_initializer(name, tensor) for name, tensor in tensors}

    def flops_per_sample(self, tokens: int) -> int:
        """FLOPs of forward and backward, without recomputation.

        By default 6 per token and element of a matrix: without attention's own products, and with
        embeddings as if they were multiplied (arXiv:2001.08361 sec. 2.1).
        """
        return 6 * tokens * sum(p.numel() for p in self.parameters() if p.ndim > 1)


def default_initializer(name: str, tensor: Tensor) -> Initializer:
    """See `Model.initializers`."""
    if name.endswith("bias"):
        return initializers.zeros
    return initializers.normal(0.02) if tensor.ndim > 1 else initializers.ones


@runtime_checkable
class ModelConfig(Protocol):
    """The [model] section: a frozen dataclass that knows its network."""

    @property
    def name(self) -> str:
        """The name in the catalog, or "package.module:Class"."""
        ...

    def spec(self) -> ModelSpec:
        """The network that these numbers stand for."""
        ...
