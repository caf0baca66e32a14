"""Adafactor (arXiv:1804.04235), whose second moment of a matrix is a row and a column.

[optimizer]
name = "examples.adafactor:AdafactorConfig"
lr = 1e-2
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from titan_dit.config.section import PositiveFloat
from titan_dit.models.base import ModelSpec
from titan_dit.optim.optimizer import Group, Optimizer, OptimizerConfig, Parameters, State


@dataclass(frozen=True, kw_only=True)
class AdafactorConfig(OptimizerConfig):
    """Algorithm 4 with relative step sizes: rates are multiples of a tensor's own size."""

    lr: PositiveFloat = 1e-2
    """Step relative to the root mean square of a tensor's weights."""
    decay_power: PositiveFloat = 0.8
    """The second moment's decay at step t is 1 - t^-decay_power (section 7.2)."""
    clip: PositiveFloat = 1.0
    """Maximum root mean square of an update before the rate (section 6)."""
    eps: PositiveFloat = 1e-30
    """Added to squared gradients."""
    least_scale: PositiveFloat = 1e-3
    """Minimum size of a tensor's weights for its step."""

    def build(self, parameters: Parameters, model_spec: ModelSpec) -> Optimizer:
        """Adafactor over plain or sharded parameters."""
        return Adafactor(self.grouped(parameters), self)

    def num_moments(self, name: str, shape: Sequence[int]) -> float:
        """A row and a column of a matrix; a vector has the whole second moment."""
        return sum(shape) / max(1, torch.Size(shape).numel()) if len(shape) == 2 else 1


class Adafactor(Optimizer):
    """Means over rows, columns and tensors are DTensors' own: shards give those of the whole."""

    whole_states = ("step", "rows", "columns")

    def __init__(self, groups: list[Group], config: AdafactorConfig) -> None:
        self.config = config
        super().__init__(groups, {"lr": config.lr})

    def new_states(self, weights: Sequence[Tensor], group: Group) -> list[State]:
        """Zeros; the rows and columns of the whole matrix on every rank."""
        found = []
        for parameter, weight in zip(group["params"], weights, strict=True):
            state = {"step": torch.zeros((), device=weight.device)}
            if parameter.ndim == 2:
                state["rows"] = weight.new_zeros(parameter.shape[0], 1)
                state["columns"] = weight.new_zeros(1, parameter.shape[1])
            else:
                state["exp_avg_sq"] = torch.zeros_like(weight, requires_grad=False)
            found.append(state)
        return found

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter as a whole tensor, sharded or not."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.move(parameter, parameter.grad, group)

    def move(self, weight: Tensor, gradient: Tensor, group: Group) -> None:
        """A step of one parameter, unless `skip`."""
        c, state = self.config, self.state[weight]
        state["step"].add_(~self.skip)
        decay = 1 - state["step"].clamp(min=1) ** -c.decay_power
        square = gradient.square() + c.eps

        def averaged(name: str, value: Tensor) -> Tensor:
            old = state[name]
            kept, is_bad = (like(x, value) for x in (decay, self.skip))
            found: Tensor = value * (1 - kept) + old * kept
            old.copy_(torch.where(is_bad, old, found))
            return found

        if weight.ndim == 2:
            rows = averaged("rows", whole(square.mean(1, keepdim=True)))
            columns = averaged("columns", whole(square.mean(0, keepdim=True)))
            factors = (rows / rows.mean()).rsqrt(), columns.rsqrt()
            update = gradient * like(factors[0], gradient) * like(factors[1], gradient)
        else:
            update = gradient * averaged("exp_avg_sq", square).rsqrt()
        size = whole(weight.square().mean()).sqrt().clamp(min=c.least_scale)
        length = whole(update.square().mean()).sqrt()
        rate = group["lr"] * size / (length / c.clip).clamp(min=1)
        moved = weight * (1 - group["lr"] * group["weight_decay"]) - update * like(rate, update)
        weight.copy_(torch.where(like(self.skip, weight), weight, moved))


def whole(tensor: Tensor) -> Tensor:
    """A plain tensor of all values; those of shards are summed or gathered."""
    found: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found


def like(value: Tensor, other: Tensor) -> Tensor:
    """A plain tensor that is equal on all ranks, for operations with `other`."""
    if not isinstance(other, DTensor):
        return value
    mesh = other.device_mesh
    placements = [Replicate()] * mesh.ndim
    found: Tensor = DTensor.from_local(value, mesh, placements, run_check=False)
    return found
