"""The executor of context parallelism: this rank's slice of every sample's tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from titan_dit.objectives.base import Prepared
from titan_dit.parallel.context import slice_tokens
from titan_dit.pipeline.base import Executor


class SlicedExecutor:
    """Runs another executor on the tokens that this rank of `mesh` holds."""

    def __init__(self, inner: Executor, mesh: DeviceMesh, token_dims: Mapping[str, int]) -> None:
        self.inner = inner
        self.mesh = mesh
        self.token_dims = token_dims

    def step(self, prepared: Prepared) -> Tensor:
        """See `Executor.step`: the loss is this slice's share."""
        return self.inner.step(
            replace(
                prepared,
                inputs=self.slice(prepared.inputs),
                static=self.slice(prepared.static),
                targets=self.slice(prepared.targets),
            )
        )

    def predict(self, inputs: Mapping[str, Tensor], static: Mapping[str, Tensor]) -> Tensor:
        """See `Executor.predict`: every rank gets the tokens of all."""
        mine = self.inner.predict(self.slice(inputs), self.slice(static)).contiguous()
        slices = [torch.empty_like(mine) for _ in range(self.mesh.size())]
        dist.all_gather(slices, mine, group=self.mesh.get_group())
        return torch.cat(slices, 1)

    def slice(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tokens of this rank, of every tensor that has tokens."""
        dims = {name: dim for name, dim in self.token_dims.items() if name in tensors}
        return slice_tokens(tensors, dims, self.mesh.get_local_rank(), self.mesh.size())
