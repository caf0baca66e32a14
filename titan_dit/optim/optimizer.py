"""The interface of an optimizer: updates local shards, and can skip a step on the device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from titan_dit.config.training import OptimizerConfig
from titan_dit.optim.shards import sharded_like, shards_of

State = dict[str, Tensor]
"""An optimizer's tensors of one parameter by name, such as "exp_avg"."""


class Optimizer(torch.optim.Optimizer, ABC):
    """Updates every rank's own shards, in place.

    `state` holds what a checkpoint saves, with the placements of the parameters; `shards` the same
    memory as local tensors.
    """

    def __init__(self, parameters: Iterable[Any], defaults: Mapping[str, Any]) -> None:
        super().__init__(parameters, dict(defaults))
        self.skip = torch.tensor(False)
        """A scalar on the device; if true, a step changes nothing. Reading it synchronises."""
        self.shards: dict[Tensor, State] = {}
        for group in self.param_groups:
            self._make_states(group)

    @abstractmethod
    def new_states(self, weights: Sequence[Tensor], group: dict[str, Any]) -> list[State]:
        """The states of a group's parameters before the first step, for their shards `weights`."""

    @abstractmethod
    def update(
        self,
        weights: list[Tensor],
        gradients: list[Tensor],
        states: Sequence[State],
        group: Mapping[str, Any],
    ) -> None:
        """Update shards and states of one group's parameters in place, unless `skip` is true."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        assert closure is None, "the loss is not evaluated again"
        for group in self.param_groups:
            learning = [p for p in group["params"] if p.grad is not None]
            if learning:
                gradients = shards_of([p.grad for p in learning])
                states = [self.shards[p] for p in learning]
                self.update(shards_of(learning), gradients, states, group)

    @torch.no_grad()
    def _make_states(self, group: dict[str, Any]) -> None:
        weights = shards_of(group["params"])
        made = zip(group["params"], weights, self.new_states(weights, group), strict=True)
        for parameter, weight, shards in made:
            self.shards[parameter] = shards
            self.state[parameter] = {
                key: sharded_like(shard, parameter) if shard.shape == weight.shape else shard
                for key, shard in shards.items()
            }


class AdamW(Optimizer):
    """AdamW (arXiv:1711.05101), by torch's kernels."""

    def new_states(self, weights: Sequence[Tensor], group: dict[str, Any]) -> list[State]:
        """Zero moments, and the number of steps; the fused kernel counts on the device."""
        device = weights[0].device if group["fused"] else torch.device("cpu")
        # The counts are views of one tensor: one operation counts for all.
        counts = group["counts"] = torch.zeros(len(weights), dtype=torch.float32, device=device)
        return [
            {
                "step": count,
                "exp_avg": torch.zeros_like(weight, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(weight, requires_grad=False),
            }
            for weight, count in zip(weights, counts.unbind(), strict=True)
        ]

    def update(
        self,
        weights: list[Tensor],
        gradients: list[Tensor],
        states: Sequence[State],
        group: Mapping[str, Any],
    ) -> None:
        """One call for all shards; without the fused kernel it synchronises to read `skip`."""
        tensors: Any = (
            weights,
            gradients,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
        )
        settings: dict[str, Any] = {
            "lr": group["lr"],
            "beta1": group["betas"][0],
            "beta2": group["betas"][1],
            "eps": group["eps"],
            "weight_decay": group["weight_decay"],
            "amsgrad": False,
            "maximize": False,
        }
        if not group["fused"]:
            if not self.skip.item():
                adamw(*tensors, **settings | {"foreach": False, "fused": False})
            return
        skipped = self.skip.float()
        is_whole = len(states) == len(group["counts"])
        counts = [group["counts"]] if is_whole else tensors[-1]
        torch._foreach_add_(counts, 1)
        torch._fused_adamw_(*tensors, **settings, found_inf=skipped)
        torch._foreach_sub_(counts, [skipped] * len(counts))


def build_optimizer(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> Optimizer:
    """AdamW over plain or sharded parameters."""
    keys = ("lr", "betas", "eps", "weight_decay", "fused")
    return AdamW(parameters, {key: getattr(config, key) for key in keys})


def apply_gradients(optimizer: Optimizer, lr: float, skip: Tensor) -> None:
    """Take one optimizer step at `lr`, unless `skip` (a scalar on the device) is true."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.skip = skip
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def optimizer_tensors(
    optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]
) -> dict[str, dict[str, Tensor]]:
    """The optimizer's tensors by parameter name, to save or to load in place."""
    return {name: optimizer.state[parameter] for name, parameter in parameters.items()}
