"""The interface between a model and the trainer, the layouts and the pipeline."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn

from titan_dit.config.parameter_groups import matches
from titan_dit.models import initializers
from titan_dit.models.initializers import Initializer

Stream: TypeAlias = tuple[Tensor, ...]
"""Activations from embed through the blocks to head: tensors with gradients, batch first.
Pipeline stages send each other nothing else."""

SideInputs: TypeAlias = Mapping[str, Tensor]
"""Inputs of every part beside the stream, without gradients: `ModelSpec.context` (batch first) and
`ModelSpec.static` (no batch dim) in one mapping."""

Mask: TypeAlias = Literal["none", "causal", "lengths"]
"""Keys that a query attends to: all; up to its own position; up to its sample's length."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of one input or output of a model."""

    shape: tuple[int, ...]
    """Sizes of all dims but the batch dim."""
    token_dim: int | None = None
    """The dim of `shape` that counts tokens and is sliced over cp; None if there is none."""
    dtype: torch.dtype | None = None
    """None uses [precision] dtype."""
    at_least_fp32: bool = False
    """With dtype None: fp32 where [precision] dtype is "bf16" or "fp16". For a stream tensor to
    whose gradient every block adds."""

    def dtype_under(self, precision: torch.dtype) -> torch.dtype:
        """The dtype of this tensor under [precision] dtype."""
        if self.at_least_fp32:
            precision = torch.promote_types(precision, torch.float32)
        return self.dtype or precision


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A network before it is built: its tensors, and the sizes that layouts divide."""

    build: Callable[[], Model]
    """Builds the network on the current default device."""
    inputs: Mapping[str, TensorSpec]
    """Inputs of `embed`; batch first."""
    stream: Mapping[str, TensorSpec]
    """Tensors between blocks, in this order; batch first."""
    predictions: Mapping[str, TensorSpec]
    """Outputs of `head`, in this order; batch first."""
    scores: Mapping[str, TensorSpec] | None = None
    """Outputs of `head` in training, if they differ from `predictions`; batch first. A head that
    gets the targets in `context` can return losses, without holding the logits of a large
    vocabulary. `predictions` are then its outputs without context."""
    context: Mapping[str, TensorSpec] = field(default_factory=dict)
    """Per-sample inputs of every pipeline stage, without gradients; batch first."""
    optional: tuple[str, ...] = ()
    """Names of `context` that a batch may lack."""
    static: Mapping[str, TensorSpec] = field(default_factory=dict)
    """Inputs of every pipeline stage that are equal for all samples; no batch dim."""
    num_layers: int
    """Number of blocks."""
    num_heads: int
    """Attention heads per block."""
    num_key_value_heads: int | None = None
    """Key and value heads per block (grouped queries). None: `num_heads`."""
    head_dim: int
    """Channels of an attention head."""
    ffn: int
    """Width of a block's MLP."""
    num_tokens: int
    """Predicted tokens of a sample: each has a loss."""
    num_text_tokens: int = 0
    """Tokens of a sample that attention sees beside the predicted ones, such as a caption's."""
    mask: Mask = "none"
    """Attention mask of the blocks."""
    layer_kinds: tuple[str, ...] = ()
    """Kind of every block, see `kind_of`. Empty: all blocks are alike."""
    kind_costs: Mapping[str, float] = field(default_factory=dict)
    """Cost of a block of each kind, in one unit with `embed_cost` and `head_cost`, for balancing
    pipeline stages; 1 for a kind that is not named."""
    embed_cost: float = 0.0
    """Cost of embed relative to a block."""
    head_cost: float = 0.0
    """Cost of head relative to a block."""

    @property
    def num_attended_tokens(self) -> int:
        """Tokens of a sample in attention and in the linears of a block."""
        return self.num_tokens + self.num_text_tokens

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kind of every block: `layer_kinds`, or "" for each if all are alike."""
        return self.layer_kinds or ("",) * self.num_layers

    @property
    def alike(self) -> bool:
        """True if all blocks are of one kind."""
        return len(set(self.layer_kinds)) < 2

    @property
    def layer_costs(self) -> tuple[float, ...]:
        """Cost of every block."""
        return tuple(float(self.kind_costs.get(kind, 1.0)) for kind in self.kinds)

    def cost(self, layers: range) -> float:
        """Cost of consecutive blocks, with embed and head if they hold the first and last one."""
        found = sum(self.layer_costs[layers.start : layers.stop])
        found += self.embed_cost * (0 in layers) + self.head_cost * (self.num_layers - 1 in layers)
        return found

    @property
    def tokens_shown(self) -> str:
        """The number of tokens, for a console line."""
        text = f" and {self.num_text_tokens} of text" if self.num_text_tokens else ""
        return f"{self.num_tokens} tokens{text}"

    @property
    def trained_outputs(self) -> Mapping[str, TensorSpec]:
        """Outputs of `head` in training: `scores`, or else `predictions`."""
        return self.predictions if self.scores is None else self.scores


class Model(nn.Module):
    """A network in three parts: `embed`, `blocks`, `head`.

    `embed` is None except on the first pipeline stage, `head` except on the last. The keys of
    `blocks` are global layer indices on every stage.
    """

    embed: nn.Module | None
    """(inputs, side) -> stream."""
    blocks: nn.ModuleDict
    """Each (stream, side) -> stream."""
    head: nn.Module | None
    """(stream, side) -> predictions in the order of `ModelSpec.predictions`; a single one may be a
    bare tensor."""
    tied: Mapping[str, str] = MappingProxyType({})
    """Name of a parameter of `head` -> name of the parameter of `embed` that it shares."""
    exact: Collection[str] = ()
    """Modules whose parameters stay in fp32 under [precision] dtype = "bf16" and "fp16": names, in
    which * stands for any text. For small ones: every rank holds them whole during a step."""
    objective: nn.ModuleDict
    """Modules of the objective, by the layer of the block that they follow: (stream, side) ->
    stream. Their `rests(side)` is equal on all ranks; if True they are not called, so that FSDP
    gathers nothing. Their parameters, objective.LAYER.*, are trained and saved, but no part of the
    network."""

    def __init__(self) -> None:
        super().__init__()
        self.objective = nn.ModuleDict()

    def tie(self) -> None:
        """Let `head` hold the parameters of `embed` that it shares, if this stage has both.

        Call it again after parameters are replaced one by one, such as by a move to another device.
        """
        if self.embed is None or self.head is None:
            return
        for copy, original in self.tied.items():
            module, _, name = copy.rpartition(".")
            setattr(self.get_submodule(module), name, self.get_parameter(original))

    def forward(self, given: Mapping[str, Tensor] | Stream, side: SideInputs) -> Tensor | Stream:
        """Run the parts that this pipeline stage holds.

        Without `embed` the input is a stream, without `head` the output is one.
        """
        objective: Any = self.objective
        stream: Any = given if self.embed is None else self.embed(given, side)
        for layer, block in self.blocks.items():
            stream = block(stream, side)
            if layer in objective and not objective[layer].rests(side):
                stream = self.objective[layer](stream, side)
        out: Tensor | Stream = stream if self.head is None else self.head(stream, side)
        return out

    def cut(self, layers: Collection[int], *, is_first: bool, is_last: bool) -> None:
        """Keep only the part of one pipeline stage; parameter names do not change."""
        for name in ("blocks", "objective"):
            kept = {k: part for k, part in getattr(self, name).items() if int(k) in layers}
            setattr(self, name, nn.ModuleDict(kept))
        self.embed = self.embed if is_first else None
        self.head = self.head if is_last else None

    def initializers(self) -> dict[str, Initializer]:
        """The initial distribution of every parameter and buffer, by name.

        The default is GPT-2's: N(0, 0.02) for matrices, 1 for the weights of norms, 0 for biases. A
        module overrides it by an attribute `initial`: name of its tensor -> initializer.
        """
        tensors = itertools.chain(self.named_parameters(), self.named_buffers())
        table = {name: default_initializer(name, tensor) for name, tensor in tensors}
        for prefix, module in self.named_modules():
            for name, initializer in getattr(module, "initial", {}).items():
                table[f"{prefix}.{name}"] = initializer
        return table

    def flops_per_sample(self, tokens: int) -> int:
        """FLOPs of forward and backward, without recomputation.

        `tokens`: `ModelSpec.num_attended_tokens`.

        The default is 6 per token and matrix element (arXiv:2001.08361 sec. 2.1): it counts
        embeddings as matmuls and leaves out the products inside attention.
        """
        return 6 * tokens * sum(p.numel() for p in self.parameters() if p.ndim > 1)


def exact_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that `Model.exact` names; none of a module that is no `Model`."""
    patterns = getattr(model, "exact", ())
    return [module for name, module in model.named_modules() if matches(name, patterns)]


def kind_of(block: nn.Module) -> str:
    """The kind of a block: the attribute `kind` of its class, "" without one.

    Blocks of a kind have equal parameters, one tensor plan and one compiled graph.
    """
    return str(getattr(block, "kind", ""))


def default_initializer(name: str, tensor: Tensor) -> Initializer:
    """The default of `Model.initializers` for one tensor."""
    if name.endswith("bias"):
        return initializers.zeros
    return initializers.normal(0.02) if tensor.ndim > 1 else initializers.ones


@runtime_checkable
class ModelConfig(Protocol):
    """Protocol of a [model] section, which is a frozen dataclass."""

    @property
    def name(self) -> str:
        """The name in the catalog, or "package.module:Class"."""

    def spec(self) -> ModelSpec:
        """Describe the network."""
