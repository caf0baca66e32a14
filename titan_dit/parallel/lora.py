"""Adapters of LoRA on a built model's linear layers (`models.lora`); its own weights are frozen.

Activations are multiplied by A and B, so no gradient of a frozen weight is computed. The adapters
of a layer that is split over tp are split like its weight: B of a column-parallel one, A of a
row-parallel one. The other matrix is whole on every rank, and its gradients are partial sums.

With dropout the words of a microbatch (`models/lora_dropout.py`) reach the layers by an object that
all share, since a block passes its side inputs to none of them. It is set before the network runs,
so that compiled graphs get the words as inputs, and by each block that runs uncompiled.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from titan_dit.config.parameter_groups import matches
from titan_dit.config.section import UserError
from titan_dit.config.training import LoRAConfig
from titan_dit.models import lora, lora_dropout
from titan_dit.models.base import Model
from titan_dit.models.lora_dropout import HoldsWords, Words

Drop = Callable[[Tensor, int], Tensor]
"""(inputs of an adapter, the first of their channels) -> the inputs with some elements 0."""


def apply(model: Model, config: LoRAConfig, first: str = "", shards: int = 1) -> None:
    """Freeze a model on the meta device, after tensor parallelism, and add the adapters.

    `first`: name of the stream's first tensor. `shards`: sequence-parallel ranks, which hold a
    shard of the tokens between blocks.
    """
    for name, parameter in model.named_parameters():
        # A copy of a tied weight on another stage is trained as its owner is.
        # The objective's own modules are trained, too.
        patterns = ("objective.*", *config.trained)
        parameter.requires_grad_(matches(model.tied.get(name, name), patterns))
    layers = lora.adapted_layers(model, config.targets)
    for layer in layers.values():
        add(layer, config.rank, config.scale)
    if config.dropout:
        drop_inputs(model, layers, config.dropout, first, shards)


def drop_inputs(
    model: Model, layers: dict[str, nn.Linear], rate: float, first: str, shards: int
) -> None:
    """Give adapters their dropout. `layers`: the adapted ones; the others are as in `apply`."""
    words = Words()
    model.register_forward_pre_hook(lambda _, args: words.hold(args[1]))
    for name, layer in layers.items():
        in_block = name.startswith("blocks.")
        prefix = ".".join(name.split(".")[: 2 if in_block else 1])
        part = model.get_submodule(prefix)
        layer.lora_dropout = InputDropout(  # type: ignore[assignment]
            words,
            name,
            rate,
            lora_dropout.streams_read(part, name.removeprefix(f"{prefix}."), first),
            shards if in_block else 1,
            getattr(layer, "token_first", False),
        )
        number = torch.zeros((), dtype=torch.int64, device=layer.weight.device)
        layer.register_buffer(lora_dropout.NUMBER, number, persistent=False)
    for block in model.blocks.values():
        block.lora_words = words  # type: ignore[assignment]
        kind: Any = type(block)
        block.__class__ = holding_words(kind)


@functools.cache
def holding_words(kind: Any) -> Any:
    """A subclass of a block's class `kind`, see `HoldsWords`."""
    return type(f"Dropping{kind.__name__}", (HoldsWords, kind), {})


def add(layer: nn.Linear, rank: int, scale: float) -> None:
    """Give a layer its adapter, by a subclass: hooks and compiled graphs stay as they are."""
    weight = layer.weight
    outputs, inputs = weight.shape
    for name, shape, dim in ((lora.A, (rank, inputs), 1), (lora.B, (outputs, rank), 0)):
        tensor = torch.empty(shape, dtype=weight.dtype, device=weight.device)
        if isinstance(weight, DTensor):
            places = [p if p == Shard(dim) else Replicate() for p in weight.placements]
            tensor = distribute_tensor(tensor, weight.device_mesh, places, src_data_rank=None)
        layer.register_parameter(name, nn.Parameter(tensor))
    layer.lora_scale = scale  # type: ignore[assignment]
    layer.lora_dropout = None  # type: ignore[assignment]
    kind: Any = type(layer)
    layer.__class__ = adapted(kind)


@functools.cache
def adapted(kind: Any) -> Any:
    """A subclass of a linear layer's class `kind`, with an adapter."""

    class Adapted(kind):  # type: ignore[misc]
        """A linear layer, plus scale * B A x."""

        lora_A: nn.Parameter
        lora_B: nn.Parameter
        lora_scale: float
        lora_dropout: InputDropout | None
        lora_number: Tensor

        def forward(self, input: Tensor) -> Any:
            """Return x @ (weight + scale * B @ A).T + bias; without dropout."""
            factors = self.lora_A, self.lora_B
            return super().forward(input) + update(input, *factors, self.lora_scale, self.dropped)

        def dropped(self, x: Tensor, first: int) -> Tensor:
            """See `Drop`."""
            if self.lora_dropout is None:
                return x
            return self.lora_dropout(x, self.lora_number, first)

    Adapted.__name__ = Adapted.__qualname__ = f"Adapted{kind.__name__}"
    return Adapted


class InputDropout:
    """The dropout of one layer's adapter."""

    def __init__(
        self,
        words: Words,
        layer: str,
        rate: float,
        streams: tuple[str, ...],
        shards: int,
        token_first: bool,
    ) -> None:
        """`streams`: see `lora_dropout.streams_read`. `shards`: see `lora_dropout.words_of`.

        `token_first`: tokens come as [n, b, d].
        """
        self.words, self.layer, self.rate = words, layer, rate
        self.streams, self.shards, self.token_first = streams, shards, token_first

    def __call__(self, x: Tensor, number: Tensor, first: int) -> Tensor:
        """`lora_dropout.dropped` of the microbatch, or `x` in an evaluation.

        Raises UserError if the layer's inputs are not the tokens that `streams` says.
        """
        now = self.words.now
        if not now:
            return x
        if x.ndim == 2:
            words = now[lora_dropout.NAME]
        else:
            parts = [now[f"{lora_dropout.NAME}.{name}"] for name in self.streams]
            words = lora_dropout.words_of(parts, self.shards)
        if self.token_first and x.ndim == 3:
            words = words.t()
        if words.shape != x.shape[:-1]:
            raise UserError(
                f"[lora] dropout: {self.layer} gets inputs {list(x.shape)}, which are not the "
                f"tokens of {' and '.join(self.streams)}. Leave it out of targets, name what it "
                "reads by the attribute `reads` of its part's class, or set dropout = 0."
            )
        return lora_dropout.dropped(x, words, number, self.rate, first)


def update(x: Tensor, a: Tensor, b: Tensor, scale: float, drop: Drop) -> Tensor:
    """Return scale * (x A.T) B.T: x [..., i], A [r, i], B [o, r] to [..., o].

    For whole tensors or for a tp rank's shards.
    """
    if isinstance(a, DTensor) and isinstance(b, DTensor):
        return sharded(x, a, b, scale, drop)
    return low_rank_product(drop(x, 0), a, b, scale)


def low_rank_product(
    x: Float[Tensor, "*n i"], a: Float[Tensor, "r i"], b: Float[Tensor, "o r"], scale: float
) -> Float[Tensor, "*n o"]:
    """Return scale * (x A.T) B.T."""
    return F.linear(F.linear(x, a) * scale, b)


def sharded(x: Tensor, a: DTensor, b: DTensor, scale: float, drop: Drop) -> DTensor:
    """`low_rank_product` on a tp rank's parts.

    `x` and the result are DTensors, placed as the layer's.
    """
    grads: dict[str, Any] = {"a": [Replicate()], "b": [Replicate()]}
    placement: Placement = Replicate()
    first = 0
    if b.placements[0] == Shard(0):
        placement, grads = Shard(0), {"a": [Partial()], "b": [Shard(0)]}
    elif a.placements[0] == Shard(1):
        placement, grads = Shard(1), {"a": [Shard(1)], "b": [Partial()]}
        first = a.device_mesh.get_local_rank() * -(-a.shape[1] // a.device_mesh.size())
    own_a = a.to_local(grad_placements=grads["a"])
    own_b = b.to_local(grad_placements=grads["b"])

    def product(own: Tensor) -> Tensor:
        return low_rank_product(drop(own, first), own_a, own_b, scale)

    return on_shards(x, a.device_mesh, placement, b.shape[0], product)


def on_shards(
    x: Tensor,
    mesh: DeviceMesh,
    placement: Placement,
    outputs: int,
    product: Callable[[Tensor], Tensor],
) -> DTensor:
    """Apply `product` to this tp rank's part of `x`; return the output as a DTensor.

    `placement`: of the weight [outputs, inputs]. Shard(0), column-parallel: x replicated, output
    Shard(-1). Shard(1), row-parallel: x Shard(-1), output Partial. Replicate: both replicated.
    `outputs`: the global output dim, for uneven shards.
    """
    last = x.ndim - 1
    given: list[Placement] = [Shard(last) if placement == Shard(1) else Replicate()]
    found: list[Placement] = [Replicate()]
    grad = given
    if placement == Shard(0):
        found, grad = [Shard(last)], [Partial()]
    elif placement == Shard(1):
        found = [Partial()]
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, given, run_check=False)
    out = product(x.redistribute(placements=given).to_local(grad_placements=grad))
    if found == [Shard(last)] and outputs % mesh.size():
        # Ranks have shards of different sizes: torch would assume this rank's size for all.
        shape = torch.Size((*out.shape[:-1], outputs))
        stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(out.ndim))
        return DTensor.from_local(out, mesh, found, run_check=False, shape=shape, stride=stride)
    return DTensor.from_local(out, mesh, found, run_check=False)
