"""AdamW on local shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from titan_dit.optim.optimizer import Group, Optimizer, State


class AdamW(Optimizer):
    """AdamW (arXiv:1711.05101), by torch's kernels."""

    whole_states = ("step",)

    def is_elementwise(self, group: Group) -> bool:
        """True: every element has its own moments. A subclass's own methods may mix elements."""
        kind = type(self)
        return kind.update is AdamW.update and kind.new_states is AdamW.new_states

    def new_states(self, weights: Sequence[Tensor], group: Group) -> list[State]:
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
        group: Group,
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
