"""Spread a model on the meta device over the mesh, in one visible order."""

from __future__ import annotations

from collections.abc import Callable

from titan_dit.config import CompileConfig, ParallelConfig, PrecisionConfig, RematConfig
from titan_dit.models.base import Model
from titan_dit.parallel import attention, context, fsdp, remat, tensor
from titan_dit.parallel.compile import compile_blocks
from titan_dit.parallel.mesh import Mesh
from titan_dit.parallel.tensor import TensorPlan


def parallelize(
    model: Model,
    mesh: Mesh,
    plan: Callable[[bool], TensorPlan],
    parallel: ParallelConfig,
    precision: PrecisionConfig,
    recompute: RematConfig,
    compilation: CompileConfig,
) -> None:
    """Cut, choose attention and let it reach other ranks' tokens, recompute, compile, shard."""
    if mesh.sizes.tp > 1:
        tensor.shard(model, mesh.tp, plan(parallel.sequence_parallel))
    attention.apply(model, precision.attention)
    if mesh.sizes.cp > 1:
        context.apply(model, mesh.cp, parallel.cp_method, precision.attention)
    remat.apply(model, recompute)
    compile_blocks(model, compilation)
    fsdp.shard(model, mesh.fsdp, parallel, precision)
