"""Muon: momentum, orthogonalised (https://kellerjordan.github.io/posts/muon; arXiv:2502.16982).

The matrices of the blocks take Muon, all other parameters AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_dit.config.section import UserError, show
from titan_dit.models.base import ModelSpec
from titan_dit.optim.adamw import AdamW, AdamWConfig
from titan_dit.optim.exchange import Exchange
from titan_dit.optim.keys import MuonKeys
from titan_dit.optim.newton_schulz import cost, orthogonalized
from titan_dit.optim.optimizer import Group, Optimizer, Parameters, State

PROJECTIONS = 3
"""Queries, keys and values."""


@dataclass(frozen=True, kw_only=True)
class MuonConfig(MuonKeys, AdamWConfig):
    """Muon for matrices (arXiv:2502.16982), AdamW for all other parameters."""

    def takes(self, name: str, shape: Sequence[int]) -> bool:
        """True if a parameter takes Muon."""
        return len(shape) == 2 and any(fnmatchcase(name, p) for p in self.matrices)

    def num_moments(self, name: str, shape: Sequence[int]) -> int:
        """One momentum, or AdamW's two."""
        return 1 if self.takes(name, shape) else super().num_moments(name, shape)

    def projections(self, name: str) -> int:
        """Number of matrices in a parameter's rows: 3 for a fused qkv, else 1."""
        return PROJECTIONS if any(fnmatchcase(name, p) for p in self.fused_qkv) else 1

    def check(self, shapes: Mapping[str, torch.Size], model_spec: ModelSpec) -> None:
        """Refuse patterns that match no matrix, and fused_qkv for rows of another layout."""
        own = {name: shape for name, shape in shapes.items() if self.takes(name, shape)}
        if not own:
            raise UserError(
                f"[optimizer] matrices={show(self.matrices)} matches no parameter with two dims: "
                'nothing takes Muon. Set other patterns, or name = "adamw".'
            )
        for pattern in self.matrices:
            if not any(fnmatchcase(name, pattern) for name in own):
                raise UserError(
                    f"[optimizer] matrices: the pattern {show(pattern)} matches no parameter with "
                    "two dims. Remove it, or correct it."
                )
        for pattern in self.fused_qkv:
            is_default = self.fused_qkv == type(self).fused_qkv
            if not is_default and not any(fnmatchcase(name, pattern) for name in own):
                raise UserError(
                    f"[optimizer] fused_qkv: the pattern {show(pattern)} matches no matrix that "
                    "takes Muon. Remove it, or correct it."
                )
        # With grouped queries the rows can be as many, in another order.
        grouped = model_spec.query_groups not in (0, model_spec.num_heads)
        for name, shape in own.items():
            fits = not grouped and shape[0] % (PROJECTIONS * model_spec.head_dim) == 0
            if self.projections(name) > 1 and not fits:
                raise UserError(
                    f"[optimizer] fused_qkv={show(self.fused_qkv)} matches {name} with {shape[0]} "
                    f"rows, which are not [heads, 3, {model_spec.head_dim}]. Narrow the pattern, "
                    "or set fused_qkv = []."
                )

    def lines(self, shapes: Mapping[str, torch.Size]) -> Iterator[str]:
        """Console line: number of matrices that take Muon, and of fused qkv among them."""
        own = [name for name, shape in shapes.items() if self.takes(name, shape)]
        split = sum(self.projections(name) > 1 for name in own)
        yield (
            f"muon    {len(own)} matrices, {split} of them as queries, keys and values; AdamW for "
            f"{len(shapes) - len(own)} tensors"
        )

    def build(self, parameters: Parameters, model_spec: ModelSpec) -> Optimizer:
        """Muon over plain or sharded parameters."""

        def settings(name: str, parameter: nn.Parameter) -> dict[str, Any]:
            if not self.takes(name, parameter.shape):
                return {"matrices": False, "lr_factor": (self.adamw_lr or self.lr) / self.lr}
            layout = None
            if isinstance(parameter, DTensor):
                layout = parameter.device_mesh, parameter.placements
            return {"matrices": True, "layout": layout}

        return Muon(self.grouped(parameters, settings), self, model_spec.head_dim)


class Muon(AdamW):
    """Muon and AdamW, each for its groups. All matrices of a Muon group have one layout."""

    def __init__(self, groups: Sequence[Group], config: MuonConfig, head_dim: int) -> None:
        self.config, self.head_dim = config, head_dim
        super().__init__(groups, config.defaults)

    def new_states(self, weights: Sequence[Tensor], group: Group) -> list[State]:
        """Zero momentum; views of one tensor for the whole group."""
        if not group["matrices"]:
            return super().new_states(weights, group)
        shapes = [self.projected(name, p.shape) for name, p in named(group)]
        group["exchange"] = Exchange(group["params"], [cost(*shape) for shape in shapes])
        group["ratios"] = [self.ratio(*shape[1:]) for shape in shapes]
        sizes = [weight.numel() for weight in weights]
        momentum = group["momentum"] = torch.zeros_like(weights[0].new_empty(sum(sizes)))
        parts = zip(torch.split(momentum, sizes), weights, strict=True)
        return [{"momentum_buffer": part.view(weight.shape)} for part, weight in parts]

    def update(
        self,
        weights: list[Tensor],
        gradients: list[Tensor],
        states: Sequence[State],
        group: Group,
    ) -> None:
        """One pass over a group's momentum; no operation waits for `skip`."""
        if not group["matrices"]:
            super().update(weights, gradients, states, group)
            return
        if len(weights) != len(group["params"]):
            without = [name for name, p in named(group) if p.grad is None]
            raise UserError(
                f"[optimizer] matrices: {without[0]} has no gradient in this step. Muon needs one "
                "of every matrix: narrow the patterns."
            )
        step = self.momentum_step(gradients, group["momentum"])
        factor = step.new_full((), 1 - group["lr"] * group["weight_decay"])
        factor.masked_fill_(self.skip, 1.0)
        directions = self.directions(step, weights, group)
        # Not a product with 0: a bad step may hold NaN.
        directions = directions.to(step.dtype).masked_fill_(self.skip, 0.0)
        torch._foreach_mul_(weights, factor)
        sizes = [weight.numel() for weight in weights]
        by_ratio: dict[float, tuple[list[Tensor], list[Tensor]]] = {}
        parts = zip(group["ratios"], weights, torch.split(directions, sizes), strict=True)
        for ratio, weight, part in parts:
            some, their = by_ratio.setdefault(ratio, ([], []))
            some.append(weight)
            their.append(part.view(weight.shape))
        for ratio, (some, their) in by_ratio.items():
            torch._foreach_add_(some, their, alpha=-group["lr"] * ratio)

    def momentum_step(self, gradients: Sequence[Tensor], momentum: Tensor) -> Tensor:
        """Update the momentum unless `skip`; return the step to orthogonalise, [elements]."""
        gradient = torch.cat([g.reshape(-1) for g in gradients])
        updated = momentum.lerp(gradient, 1 - self.config.momentum)
        torch.where(self.skip, momentum, updated, out=momentum)
        return gradient.lerp_(updated, self.config.momentum) if self.config.nesterov else updated

    def directions(self, step: Tensor, weights: Sequence[Tensor], group: Group) -> Tensor:
        """The orthogonalised steps of this rank's shards, [elements]. Collective."""
        # fp64 runs are for comparisons: no step of theirs may round to fp32.
        dtype = torch.bfloat16 if self.config.ns_dtype == "bf16" else step.dtype
        sizes = [weight.numel() for weight in weights]
        step = step.to(dtype)
        parts = zip(torch.split(step, sizes), weights, strict=True)
        exchange: Exchange = group["exchange"]
        whole = exchange.gather([part.view(weight.shape) for part, weight in parts])
        by_shape: dict[tuple[int, int, int], list[int]] = {}
        names = group["names"]
        for number, matrix in whole.items():
            by_shape.setdefault(self.projected(names[number], matrix.shape), []).append(number)
        for (count, rows, columns), numbers in by_shape.items():
            # Equal shapes in one batch.
            stacked = torch.stack([whole[n] for n in numbers])
            apart = self.apart(stacked, count) if count > 1 else stacked
            done = orthogonalized(apart.reshape(-1, rows, columns), self.config.ns_steps)
            done = self.together(done, count) if count > 1 else done
            whole |= dict(zip(numbers, done, strict=True))
        return torch.cat([shard.reshape(-1) for shard in exchange.scatter(whole, step)])

    def apart(self, fused: Tensor, count: int) -> Tensor:
        """[m, heads x count x head_dim, i] -> [m, count, heads x head_dim, i]."""
        heads = fused.view(len(fused), -1, count, self.head_dim, fused.shape[-1])
        return heads.transpose(1, 2).flatten(2, 3)

    def together(self, apart: Tensor, count: int) -> Tensor:
        """[m x count, heads x head_dim, i] -> [m, heads x count x head_dim, i]."""
        heads, columns = apart.shape[1] // self.head_dim, apart.shape[2]
        projections = apart.reshape(-1, count, heads, self.head_dim, columns)
        return projections.transpose(1, 2).flatten(1, 3)

    def projected(self, name: str, shape: Sequence[int]) -> tuple[int, int, int]:
        """(count, rows, columns) of the matrices that a parameter holds."""
        count = self.config.projections(name)
        return count, shape[0] // count, shape[1]

    def ratio(self, rows: int, columns: int) -> float:
        """Factor on the learning rate, see `MuonConfig.adjust_lr`."""
        if self.config.adjust_lr == "original":
            return math.sqrt(max(1.0, rows / columns))
        return 0.2 * math.sqrt(max(rows, columns))


def named(group: Group) -> list[tuple[str, nn.Parameter]]:
    """Names and parameters of a group."""
    return list(zip(group["names"], group["params"], strict=True))
