"""Spread a model on the meta device over the mesh, in one visible order."""

from __future__ import annotations

from titan_dit.config import CompileConfig, ParallelConfig, PrecisionConfig
from titan_dit.models.base import Model
from titan_dit.parallel import fsdp
from titan_dit.parallel.compile import compile_blocks
from titan_dit.parallel.mesh import Mesh


def parallelize(
    model: Model,
    mesh: Mesh,
    parallel: ParallelConfig,
    precision: PrecisionConfig,
    compilation: CompileConfig,
) -> None:
    """Compile, then shard. Later axes take their place in this list."""
    compile_blocks(model, compilation)
    fsdp.shard(model, mesh.fsdp, parallel, precision)
