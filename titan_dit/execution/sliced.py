"""The executor of context parallelism: this rank's slice of every sample's tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from titan_dit.execution.base import NOTHING, Executor, Tensors
from titan_dit.models.base import ModelSpec, TensorSpec
from titan_dit.objectives.base import Prepared
from titan_dit.parallel.context import Slicing, join_tokens, slice_tokens


@dataclass(frozen=True)
class TokenDims:
    """The token dim of every tensor that has one, counting the batch dim."""

    inputs: Mapping[str, int]
    context: Mapping[str, int]
    static: Mapping[str, int]
    targets: Mapping[str, int]

    @classmethod
    def of(cls, model_spec: ModelSpec, token_targets: tuple[str, ...]) -> TokenDims:
        """The token dims of a model and an objective."""
        return cls(
            inputs=dims_of(model_spec.inputs, batch=1),
            context=dims_of(model_spec.context, batch=1),
            static=dims_of(model_spec.static, batch=0),
            targets=dict.fromkeys(token_targets, 1),
        )


def dims_of(specs: Mapping[str, TensorSpec], batch: int) -> dict[str, int]:
    """The token dims of tensors with `batch` (0 or 1) batch dims before the dims of their spec."""
    return {
        name: spec.token_dim + batch for name, spec in specs.items() if spec.token_dim is not None
    }


class SlicedExecutor(Executor):
    """Runs another executor on the token slice of this rank of `mesh`."""

    def __init__(
        self,
        inner: Executor,
        mesh: DeviceMesh,
        dims: TokenDims,
        slicing: Slicing = "contiguous",
    ) -> None:
        self.inner, self.notes = inner, inner.notes
        self.mesh = mesh
        self.dims = dims
        self.slicing = slicing

    def run(self, prepared: Prepared, loss_scale: Tensor | None = None) -> Tensor:
        """See `Executor.step`: the loss is this slice's share."""
        return self.inner.step(self.sliced(prepared), loss_scale)

    def predict(self, inputs: Tensors, static: Tensors, context: Tensors = NOTHING) -> Tensor:
        """See `Executor.predict`. Predictions are all-gathered over cp."""
        found = self.inner.predict(
            self.slice(inputs, self.dims.inputs),
            self.slice(static, self.dims.static),
            self.slice(context, self.dims.context),
        )
        return self.all_gather_tokens(found)

    def evaluate(self, prepared: Prepared) -> Tensor:
        """See `Executor.evaluate`."""
        return self.all_gather_tokens(self.inner.evaluate(self.sliced(prepared)))

    def sliced(self, prepared: Prepared) -> Prepared:
        """A batch reduced to the tokens of this rank."""
        weight = prepared.weight
        if weight.ndim == 2:
            weight = self.slice({"weight": weight}, {"weight": 1})["weight"]
        return replace(
            prepared,
            inputs=self.slice(prepared.inputs, self.dims.inputs),
            context=self.slice(prepared.context, self.dims.context),
            static=self.slice(prepared.static, self.dims.static),
            targets=self.slice(prepared.targets, self.dims.targets),
            weight=weight,
        )

    def slice(self, tensors: Mapping[str, Tensor], dims: Mapping[str, int]) -> dict[str, Tensor]:
        """Slice every tensor that has a token dim."""
        present = {name: dim for name, dim in dims.items() if name in tensors}
        rank, size = self.mesh.get_local_rank(), self.mesh.size()
        return slice_tokens(tensors, present, rank, size, self.slicing)

    def all_gather_tokens(self, mine: Tensor) -> Tensor:
        """All-gather token slices to [b, n, ...], in the order of the sample."""
        mine = mine.contiguous()
        slices = [torch.empty_like(mine) for _ in range(self.mesh.size())]
        dist.all_gather(slices, mine, group=self.mesh.get_group())
        return join_tokens(slices, self.slicing)
