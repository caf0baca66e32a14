"""What an optimizer and the EMA hold for each part of a model, from a config and shapes alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from titan_dit.config.job import JobConfig
from titan_dit.config.parameter_groups import groups_of
from titan_dit.optim.muon import MuonConfig

PARTS = ("embed", "block", "head")


@dataclass(frozen=True, kw_only=True)
class OptimizerState:
    """Per element; parts are embed, a block and the head. The defaults are AdamW's, without EMA."""

    embed: float = 2.0
    """Tensors of the optimizer per trained element of embed; AdamW has two."""
    block: float = 2.0
    head: float = 2.0
    averages: int = 0
    """Of the EMA, each with all elements."""
    matrices: float = 0.0
    """Trained elements of a block that Muon orthogonalises, as a share."""
    num_matrices: int = 0
    """How many tensors of a block they are."""
    shard_work: float = 0.0
    """Bytes that a step takes at its highest point per element of their shards."""
    whole_work: float = 0.0
    """The same per element of the matrices that a rank makes whole."""
    received_work: float = 0.0
    """The same per element of the shards that come back from other ranks."""


ADAMW = OptimizerState()


def state_of(config: JobConfig) -> OptimizerState:
    """The state of [optimizer] and [ema] for a config's model; builds it on the meta device."""
    with torch.device("meta"):
        model = config.objective.model_spec(config.model).build()
    shapes: dict[str, dict[str, Sequence[int]]] = {part: {} for part in PARTS}
    frozen = groups_of((name for name, _ in model.named_parameters()), config.optimizer.groups)
    first = f"blocks.{next(iter(model.blocks))}."
    for name, parameter in model.named_parameters():
        part = "block" if name.startswith(first) else name.partition(".")[0]
        is_trained = name not in frozen or not frozen[name].frozen
        if part in shapes and is_trained:
            shapes[part][name] = tuple(parameter.shape)
    embed, block, head = (moments_per_element(config, shapes[part]) for part in PARTS)
    state = OptimizerState(embed=embed, block=block, head=head, averages=len(config.ema.names))
    optimizer = config.optimizer
    if not isinstance(optimizer, MuonConfig):
        return state
    own = {n: shape for n, shape in shapes["block"].items() if optimizer.takes(n, shape)}
    share = elements(own.values()) / max(1, elements(shapes["block"].values()))
    state = replace(state, matrices=share, num_matrices=len(own))
    return with_muon_work(state, optimizer, own) if own else state


def moments_per_element(config: JobConfig, shapes: dict[str, Sequence[int]]) -> float:
    """Mean number of the optimizer's tensors per element."""
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    held = sum(config.optimizer.num_moments(n, shapes[n]) * size for n, size in sizes.items())
    return held / max(1, sum(sizes.values()))


def elements(shapes: Iterable[Sequence[int]]) -> int:
    """Elements of several tensors."""
    return sum(math.prod(shape) for shape in shapes)


def with_muon_work(
    state: OptimizerState, config: MuonConfig, shapes: dict[str, Sequence[int]]
) -> OptimizerState:
    """Bytes per element at the highest point of Muon's step: when the results are scattered.

    The step is in memory in fp32 and in the format of the iterations. Of the whole matrices there
    are the results, and all of them in one message or tensor; those of tall ones are transposed,
    and copied before; those of the last shape are still stacked.
    """
    width = 2.0 if config.ns_dtype == "bf16" else 4.0
    sizes: dict[tuple[int, int, int], int] = {}
    for name, (rows, columns) in shapes.items():
        count = config.projections(name)
        shape = count, rows // count, columns
        sizes[shape] = sizes.get(shape, 0) + rows * columns
    total = sum(sizes.values())
    tall = sum(size for (count, a, b), size in sizes.items() if count == 1 and a > b)
    last = [*sizes.values()][-1]
    return replace(
        state,
        shard_work=4 + width,
        whole_work=width * (2 + (tall + last) / total),
        received_work=width,
    )
