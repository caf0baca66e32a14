"""Lion (arXiv:2302.06675), an optimizer from outside the package.

[optimizer]
name = "examples.lion:LionConfig"
lr = 1e-4
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from titan_dit.config.section import Decay
from titan_dit.models.base import ModelSpec
from titan_dit.optim.optimizer import Group, Optimizer, OptimizerConfig, Parameters, State


@dataclass(frozen=True, kw_only=True)
class LionConfig(OptimizerConfig):
    """The sign of a momentum, at a fixed length."""

    beta1: Decay = 0.9
    beta2: Decay = 0.99

    def build(self, parameters: Parameters, model_spec: ModelSpec) -> Optimizer:
        """Lion over a rank's shards."""
        settings = {"lr": self.lr, "beta1": self.beta1, "beta2": self.beta2}
        return Lion(self.grouped(parameters), settings)


class Lion(Optimizer):
    """Element by element, so that any shard is updated as the whole tensor would be."""

    def new_states(self, weights: Sequence[Tensor], group: Group) -> list[State]:
        """Zero momentum."""
        return [{"momentum": torch.zeros_like(w, requires_grad=False)} for w in weights]

    def update(
        self,
        weights: list[Tensor],
        gradients: list[Tensor],
        states: Sequence[State],
        group: Group,
    ) -> None:
        """torch.where, not products: the gradients of a bad step may be NaN."""
        lr, decay = group["lr"], 1 - group["lr"] * group["weight_decay"]
        for weight, gradient, state in zip(weights, gradients, states, strict=True):
            momentum = state["momentum"]
            sign = momentum.lerp(gradient, 1 - group["beta1"]).sign()
            weight.copy_(torch.where(self.skip, weight, decay * weight - lr * sign))
            moved = momentum.lerp(gradient, 1 - group["beta2"])
            momentum.copy_(torch.where(self.skip, momentum, moved))
