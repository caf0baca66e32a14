"""Vocabulary parallelism: each tp rank has the logits of some rows (arXiv:1909.08053 sec. 3).

A tensor plan shards the output layer by rows (`ColwiseParallel`). The loss then takes three
all-reduces of one number per token, instead of all-gathering the logits.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from titan_dit.kernels import cross_entropy
from titan_dit.models.vocabulary import Vocabulary


def apply(model: nn.Module, mesh: DeviceMesh) -> None:
    """Let every `Vocabulary` of a model take logits that are sharded over the 1D `mesh`."""
    for module in model.modules():
        if isinstance(module, Vocabulary):
            module.score = partial(score, mesh, module.rows)
            module.whole = partial(whole, mesh, module.rows)


def score(mesh: DeviceMesh, rows: int, logits: Tensor, targets: Tensor, size: int) -> Tensor:
    """`Vocabulary.score` for sharded logits, or whole ones if the plan replicates the layer."""
    if logits.shape[-1] == rows:
        return cross_entropy.cross_entropy(logits, targets, size)
    group = mesh.get_group()

    def reduced(value: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        dist.all_reduce(value, operation, group)
        return value

    shard = cross_entropy.VocabularyShard(
        first=mesh.get_local_rank() * largest_share(rows, mesh),
        largest=partial(reduced, operation=dist.ReduceOp.MAX),
        total=partial(reduced, operation=dist.ReduceOp.SUM),
    )
    return cross_entropy.cross_entropy(logits, targets, size, shard)


def whole(mesh: DeviceMesh, rows: int, logits: Tensor) -> Tensor:
    """`Vocabulary.whole`: all-gather; without gradients."""
    if logits.shape[-1] == rows:
        return logits
    mine = F.pad(logits, (0, largest_share(rows, mesh) - logits.shape[-1])).contiguous()
    parts = [torch.empty_like(mine) for _ in range(mesh.size())]
    dist.all_gather(parts, mine, group=mesh.get_group())
    return torch.cat(parts, -1)[..., :rows]


def largest_share(rows: int, mesh: DeviceMesh) -> int:
    """Rows of every rank but the last ones, which have fewer if the ranks do not divide `rows`."""
    return -(-rows // mesh.size())
