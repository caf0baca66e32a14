"""Muon: momentum, orthogonalised by Newton-Schulz iterations.

https://kellerjordan.github.io/posts/muon. Whole matrices are gathered from shards, each on one of
the ranks that hold its shards, and sent back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from titan_dit.config.section import UserError
from titan_dit.models.base import ModelSpec
from titan_dit.optim.adamw import AdamW
from titan_dit.optim.optimizer import Group, Parameters, State, shards_of
from titan_dit.optim.sections import MuonConfig

A, B, C = 3.4445, -4.7750, 2.0315
EPS = 1e-7


def build(config: MuonConfig, parameters: Parameters, model_spec: ModelSpec) -> Muon:
    """Muon over plain or sharded parameters."""

    def settings(name: str, parameter: nn.Parameter) -> dict[str, Any]:
        if not config.takes(name, parameter.shape):
            return {"matrices": False, "lr_factor": (config.adamw_lr or config.lr) / config.lr}
        layout = None
        if isinstance(parameter, DTensor):
            layout = parameter.device_mesh, parameter.placements
        return {"matrices": True, "layout": layout}

    return Muon(config.grouped(parameters, settings), config, model_spec.head_dim)


class Muon(AdamW):
    """Muon and AdamW, each for its groups. All matrices of a Muon group have one layout."""

    def __init__(self, groups: Sequence[Group], config: MuonConfig, head_dim: int) -> None:
        self.config, self.head_dim = config, head_dim
        super().__init__(groups, config.defaults)

    def is_elementwise(self, group: Group) -> bool:
        """True for AdamW's groups; a group's matrices are orthogonalised together."""
        return not group["matrices"]

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
        """One pass over a group's momentum; no operation waits for `skip`.

        Raises UserError for a matrix without a gradient.
        """
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


def orthogonalized(matrices: Tensor, steps: int) -> Tensor:
    """Orthogonalise matrices [k, a, b] in their own dtype."""
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    # The spectral norm becomes at most 1.
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = gram.baddbmm(gram, gram, beta=B, alpha=C)
        x = x.baddbmm(polynomial, x, beta=A)
    found: Tensor = x.mT if is_tall else x
    return found


def cost(count: int, rows: int, columns: int) -> float:
    """FLOPs of an iteration on `count` matrices: 2 m^2 M twice and 2 m^3 once."""
    small, large = sorted((rows, columns))
    return count * 2.0 * small**2 * (2 * large + small)


Shape = tuple[int, ...]


@dataclass(frozen=True)
class Hop:
    """A mesh axis that shards matrices along a dim."""

    dim: int
    size: int
    rank: int
    """This rank's coordinate along the axis."""
    group: dist.ProcessGroup

    def piece(self, shape: Shape, rank: int) -> Shape:
        """The shape of a rank's shard, as by torch.chunk: the last ones may be smaller or empty."""
        whole = shape[self.dim]
        most = -(-whole // self.size)
        own = max(0, min(most, whole - rank * most))
        return *shape[: self.dim], own, *shape[self.dim + 1 :]


class Exchange:
    """Gathers whole matrices on their owners, and returns the owners' results to all shards.

    The matrices have equal placements. Ownership is balanced by `costs`, by the same rule on every
    rank. Replicas, over dp_replicate or tp, all do the same work.
    """

    def __init__(self, matrices: Sequence[Tensor], costs: Sequence[float]) -> None:
        self.hops = hops_of(matrices[0])
        # From whole to shard: the axes in the order in which they were applied.
        self.shapes: list[list[Shape]] = [[tuple(matrix.shape) for matrix in matrices]]
        for hop in reversed(self.hops):
            self.shapes.insert(0, [hop.piece(shape, hop.rank) for shape in self.shapes[0]])
        assert self.shapes[0] == [tuple(shard.shape) for shard in shards_of(matrices)]
        sizes = [hop.size for hop in self.hops]
        self.owners = [places(owner, sizes) for owner in balanced(costs, math.prod(sizes))]

    def gather(self, shards: Sequence[Tensor]) -> dict[int, Tensor]:
        """The whole matrices that this rank owns, by number. Collective."""
        held = dict(enumerate(shards))
        for level in range(len(self.hops)):
            held = self._gather_along(level, held, shards[0])
        return held

    def scatter(self, whole: Mapping[int, Tensor], like: Tensor) -> list[Tensor]:
        """This rank's shards of all matrices, from their owners' `whole` ones. Collective.

        `like`: any tensor with their dtype and device; this rank may own none.
        """
        held = dict(whole)
        for level in reversed(range(len(self.hops))):
            held = self._scatter_along(level, held, like)
        return [held[number] for number in range(len(self.owners))]

    def _by_owner(self, level: int, numbers: Iterable[int]) -> list[list[int]]:
        """The matrices' numbers, grouped by their owner's coordinate along the axis."""
        found: list[list[int]] = [[] for _ in range(self.hops[level].size)]
        for number in numbers:
            found[self.owners[number][level]].append(number)
        return found

    def _gather_along(
        self, level: int, held: Mapping[int, Tensor], like: Tensor
    ) -> dict[int, Tensor]:
        hop, whole = self.hops[level], self.shapes[level + 1]
        owned = self._by_owner(level, held)
        mine = owned[hop.rank]
        arriving = [[hop.piece(whole[n], rank) for n in mine] for rank in range(hop.size)]
        sent = [[held[number] for number in numbers] for numbers in owned]
        received = all_to_all(sent, arriving, hop.group, like)
        parts = zip(*received, strict=True)
        return {n: torch.cat(part, hop.dim) for n, part in zip(mine, parts, strict=True)}

    def _scatter_along(
        self, level: int, held: Mapping[int, Tensor], like: Tensor
    ) -> dict[int, Tensor]:
        hop, whole = self.hops[level], self.shapes[level + 1]
        shares = [own[:level] for own in self.owners]
        here = tuple(before.rank for before in self.hops[:level])
        owned = self._by_owner(level, (n for n, share in enumerate(shares) if share == here))
        cut = {
            n: torch.split(
                held[n], [hop.piece(whole[n], r)[hop.dim] for r in range(hop.size)], hop.dim
            )
            for n in owned[hop.rank]
        }
        sent = [[cut[n][rank] for n in owned[hop.rank]] for rank in range(hop.size)]
        arriving = [[hop.piece(whole[n], hop.rank) for n in numbers] for numbers in owned]
        received = all_to_all(sent, arriving, hop.group, like)
        pairs = zip(owned, received, strict=True)
        return {n: t for numbers, found in pairs for n, t in zip(numbers, found, strict=True)}


def all_to_all(
    sent: Sequence[Sequence[Tensor]],
    arriving: Sequence[Sequence[Shape]],
    group: dist.ProcessGroup,
    like: Tensor,
) -> list[list[Tensor]]:
    """All-to-all of several tensors; `sent` and `arriving`: to and from each rank of the group."""
    flat = [tensor.reshape(-1) for tensors in sent for tensor in tensors]
    outgoing = torch.cat([like.new_empty(0), *flat])
    counts = [sum(tensor.numel() for tensor in tensors) for tensors in sent]
    sizes = [[math.prod(shape) for shape in shapes] for shapes in arriving]
    incoming = outgoing.new_empty(sum(map(sum, sizes)))
    dist.all_to_all_single(incoming, outgoing, [*map(sum, sizes)], counts, group=group)
    parts = iter(torch.split(incoming, [size for some in sizes for size in some]))
    return [[next(parts).view(shape) for shape in shapes] for shapes in arriving]


def hops_of(matrix: Tensor) -> list[Hop]:
    """The axes that shard a matrix; undo the first one first."""
    if not isinstance(matrix, DTensor):
        return []
    mesh = matrix.device_mesh
    found: list[tuple[bool, int, Hop]] = []
    for axis, placement in enumerate(matrix.placements):
        if placement.is_replicate() or mesh.size(axis) == 1:
            continue
        hop = Hop(
            placement.dim,  # type: ignore[attr-defined]
            mesh.size(axis),
            mesh.get_local_rank(axis),
            mesh.get_group(axis),
        )
        # FSDP2 shards what tp has sharded already, as _StridedShard: the axis was applied last.
        found.append((type(placement) is Shard, -axis, hop))
    return [hop for *_, hop in sorted(found, key=lambda entry: entry[:2])]


def balanced(costs: Sequence[float], count: int) -> list[int]:
    """One of `count` owners for each cost: the largest cost first, to the least loaded owner."""
    loads, owners = [0.0] * count, [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda n: (-costs[n], n)):
        owners[number] = loads.index(min(loads))
        loads[owners[number]] += costs[number]
    return owners


def places(owner: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """The coordinate of an owner along each axis."""
    found = []
    for size in reversed(sizes):
        owner, place = divmod(owner, size)
        found.append(place)
    return tuple(reversed(found))
