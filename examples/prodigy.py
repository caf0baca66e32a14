"""Prodigy (arXiv:2306.06101, algorithm 4), an optimizer that finds its own step size.

[optimizer]
name = "examples.prodigy:ProdigyConfig"
lr = 1.0                # a factor on the step size that is found; the schedule applies to it
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from titan_dit.config.section import Decay, PositiveFloat
from titan_dit.models.base import ModelSpec
from titan_dit.optim.gradient_norm import replicas
from titan_dit.optim.optimizer import (
    Group,
    Optimizer,
    OptimizerConfig,
    Parameters,
    State,
    shards_of,
)


@dataclass(frozen=True, kw_only=True)
class ProdigyConfig(OptimizerConfig):
    """AdamW with the step size lr x d, where d estimates the distance to the solution."""

    lr: PositiveFloat = 1.0
    """Factor on d."""
    beta1: Decay = 0.9
    beta2: Decay = 0.999
    eps: PositiveFloat = 1e-8
    d0: PositiveFloat = 1e-6
    """d before the first step."""

    def build(self, parameters: Parameters, model_spec: ModelSpec) -> Optimizer:
        """Prodigy over a rank's shards."""
        return Prodigy(self.grouped(parameters), self)

    def num_moments(self, name: str, shape: Sequence[int]) -> float:
        """Two moments, the weighted sum of the gradients, and the first weights."""
        return 4


class Prodigy(Optimizer):
    """Element by element but for d, whose two sums go over the shards of all ranks."""

    whole_states = ("d", "numerator")

    def __init__(self, groups: list[Group], config: ProdigyConfig) -> None:
        self.config = config
        super().__init__(groups, {"lr": config.lr})

    def new_states(self, weights: Sequence[Tensor], group: Group) -> list[State]:
        """Zeros, the weights as they are before the first step, and d."""
        zeros = torch.zeros_like
        device = weights[0].device
        return [
            {
                "exp_avg": zeros(weight, requires_grad=False),
                "exp_avg_sq": zeros(weight, requires_grad=False),
                "sum": zeros(weight, requires_grad=False),
                "first": weight.detach().clone(),
                "d": torch.full((), self.config.d0, device=device),
                "numerator": torch.zeros((), device=device),
            }
            for weight in weights
        ]

    def learning(self) -> Iterator[tuple[Tensor, Tensor, Tensor, State, Group]]:
        """(parameter, weight, gradient, state, group) of all that have a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    weight, gradient = shards_of([parameter, parameter.grad])
                    yield parameter, weight, gradient, self.shards[parameter], group

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update d from all gradients with one all-reduce of two numbers, then the weights."""
        found = [*self.learning()]
        if not found:
            return
        decay = self.config.beta2**0.5
        d = found[0][3]["d"].clone()
        sums = torch.zeros(2, dtype=torch.float64, device=d.device)
        for parameter, weight, gradient, state, group in found:
            size = group["lr"] * d * d
            added = state["sum"] * decay + (1 - decay) * size * gradient
            state["sum"].copy_(torch.where(self.skip, state["sum"], added))
            moved = (gradient * (state["first"] - weight)).sum() * size
            pair = torch.stack([moved, state["sum"].abs().sum()])
            sums += pair.double() / replicas(parameter)
        if dist.is_initialized():
            dist.all_reduce(sums)
        old = found[0][3]["numerator"].clone()
        numerator = torch.where(self.skip, old, (decay * old + (1 - decay) * sums[0]).to(old.dtype))
        estimate = (numerator / sums[1].clamp(min=1e-30)).to(d.dtype)
        larger = torch.where(self.skip, d, torch.maximum(d, estimate))
        for _, weight, gradient, state, group in found:
            self.move(weight, gradient, state, group, d)
            state["d"].copy_(larger)
            state["numerator"].copy_(numerator)

    def move(self, weight: Tensor, gradient: Tensor, state: State, group: Group, d: Tensor) -> None:
        """The step of AdamW at the rate lr x d."""
        c = self.config
        rate = group["lr"] * d
        moments = {
            "exp_avg": state["exp_avg"].lerp(d * gradient, 1 - c.beta1),
            "exp_avg_sq": state["exp_avg_sq"].lerp((d * gradient).square(), 1 - c.beta2),
        }
        step = moments["exp_avg"] / (moments["exp_avg_sq"].sqrt() + d * c.eps)
        moved = weight * (1 - rate * group["weight_decay"]) - rate * step
        weight.copy_(torch.where(self.skip, weight, moved))
        for name, value in moments.items():
            state[name].copy_(torch.where(self.skip, state[name], value))
