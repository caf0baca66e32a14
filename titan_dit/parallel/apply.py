"""A model on the meta device to a model on this rank, in one visible order."""

from __future__ import annotations

from typing import Any

import torch

from titan_dit.config import JobConfig
from titan_dit.models.base import Model
from titan_dit.parallel import fsdp
from titan_dit.parallel.compile import compile_blocks
from titan_dit.parallel.init import initialize
from titan_dit.parallel.mesh import Mesh


def parallelize(
    model: Model, mesh: Mesh, config: JobConfig[Any, Any, Any], device: torch.device
) -> None:
    """Compile, shard, then memory and weights. Later axes take their place in this list."""
    compile_blocks(model, config.compile)
    fsdp.shard(model, mesh.fsdp, config.parallel, config.precision)
    initialize(model, model.init_laws(), config.job.seed, device)
