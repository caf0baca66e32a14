"""Modules of the objective behind a block (`objectives.repa`), on the tokens that a rank holds.

Their parameters are whole on every tp rank. Where tokens are sharded over tp, a rank's gradients
are partial sums, which FSDP reduces; over cp it always sums them. A convolution gathers the
picture's tokens, computes all of them, and keeps the rank's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module

from titan_dit.models.base import Model
from titan_dit.objectives.repa import alignments
from titan_dit.parallel.mesh import Mesh
from titan_dit.parallel.tensor import TensorPlan, shard_dim


def apply(model: Model, mesh: Mesh, plan: TensorPlan) -> None:
    """Place the modules of a model on the meta device; after tensor parallelism and LoRA."""
    for module in alignments(model):
        axes = [mesh.axis("cp")] if mesh.sizes.cp > 1 else []
        if mesh.sizes.tp > 1:
            tp = mesh.axis("tp")
            is_sharded = shard_dim(plan.stream[module.place]) == 1
            distribute_module(module, tp)
            module.own_weights = partial(own_copy, is_partial=is_sharded)
            if is_sharded:
                module.own_tokens = partial(own_tokens, axes=[tp])
                axes.append(tp)
        # cp cuts a picture's tokens, tp cuts those of a cp rank.
        module.join_tokens = partial(join_tokens, axes=axes)
        module.own_of_all = partial(own_tokens, axes=axes)


def own_copy(parameter: Tensor, *, is_partial: bool) -> Tensor:
    """A tp rank's copy of a replicated parameter; its gradient is a partial sum if `is_partial`."""
    assert isinstance(parameter, DTensor)
    return parameter.to_local(grad_placements=[Partial() if is_partial else Replicate()])


def own_tokens(tokens: Tensor, axes: Sequence[DeviceMesh]) -> Tensor:
    """This rank's tokens [b, n, d] of those that the ranks of `axes` hold, the first slowest."""
    for mesh in axes:
        share = tokens.shape[1] // mesh.size()
        tokens = tokens.narrow(1, mesh.get_local_rank() * share, share)
    return tokens


def join_tokens(tokens: Tensor, axes: Sequence[DeviceMesh]) -> Tensor:
    """The inverse of `own_tokens`: all-gather; backward sums the gradients and keeps its share."""
    for mesh in reversed(axes):
        own = DTensor.from_local(tokens.contiguous(), mesh, [Shard(1)], run_check=False)
        whole = own.redistribute(placements=[Replicate()])
        # Each rank keeps other tokens of the result, so that its gradient is a part of a sum.
        tokens = whole.to_local(grad_placements=[Partial()])
    return tokens
