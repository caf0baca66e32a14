"""Gathers sharded matrices, each on one of the ranks that hold its shards, and scatters them back.

One all-to-all along each mesh axis that shards the matrices; no rank gets all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from titan_dit.optim.shards import shards_of

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
        received = exchange(sent, arriving, hop.group, like)
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
        received = exchange(sent, arriving, hop.group, like)
        pairs = zip(owned, received, strict=True)
        return {n: t for numbers, found in pairs for n, t in zip(numbers, found, strict=True)}


def exchange(
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
