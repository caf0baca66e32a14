"""The link that a message really uses, and how long it takes: latency + bytes / bandwidth.

Ranks are numbered as in `parallel.mesh` (pp, dp_replicate, dp_shard, cp, tp; tp fastest), and a
rank's node is rank // gpus_per_node: the order of the axes says which of them leaves the node. All
groups of an axis communicate at once, and those that leave a node share its NICs. Latencies add up
over the hops of NCCL's algorithms (src/graph/tuning.cc of NVIDIA/nccl): a pass of a ring has n - 1
hops, of which nodes - 1 are between nodes; a tree has the ranks of a node and log2 of the nodes, up
and down.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import NamedTuple

from titan_dit.config.section import UserError
from titan_dit.parallel.mesh import AXES, AxisSizes, axes
from titan_dit.planner.hardware import Device
from titan_dit.planner.work import Message

FLATTENED = {"all": AXES, "data": axes("samples"), "loss": axes("loss")}
"""Groups over several axes, as `parallel.mesh.Mesh` opens them; "a x b" is one, too."""


class AxisGroup(NamedTuple):
    """The slowest group of an axis."""

    ranks: int
    inside: int
    """Ranks in a node, at most."""
    nodes: int
    sharing: int
    """Groups of this axis that leave a node through its NICs; 0 for one node."""
    nics: float
    """NICs that this group has for itself: its share of the node's, and no more than are near
    its GPUs."""


class GroupCost(NamedTuple):
    """Bandwidths and latencies of a group."""

    group: AxisGroup
    bandwidth: float
    """Bytes/s that every rank of a ring sends to the next."""
    per_rank: float
    """Bytes/s of one rank across nodes, where all ranks of the node send."""
    inner: float
    """Bytes/s of one rank inside the node."""
    pair: float
    """Bytes/s from one rank to the next, limited by one GPU; between nodes also by its share of a
    NIC."""
    pass_s: float
    """Latency of the n - 1 hops of a ring."""
    tree_s: float
    """Latency of an all-reduce by NCCL's tree."""
    hop_s: float
    """Latency of the slowest hop."""


class Network:
    """The links of a layout on a device's nodes."""

    def __init__(self, sizes: AxisSizes, device: Device) -> None:
        """UserError if ranks are on several nodes and the device has no NICs."""
        self.sizes, self.device = sizes, device
        self.world_size = math.prod(asdict(sizes).values())
        gpus = device.gpus_per_node
        if self.world_size > gpus and not device.nics_per_node:
            raise UserError(
                f"[parallel] {sizes} = {self.world_size} ranks, but device {device.name} has "
                f"nodes of {gpus} and nics_per_node=0: no link between nodes. Use at most {gpus} "
                "ranks, or write nics_per_node and nic_gb_per_s in a file of your own."
            )
        self._costs: dict[str, GroupCost] = {}
        self._stages: dict[tuple[int, int], tuple[float, float]] = {}

    def group(self, axis: str) -> AxisGroup:
        """Ranks, ranks in a node, nodes and sharing of an axis' slowest group."""
        return self._cost(axis).group

    def seconds(self, message: Message) -> float:
        """Seconds of a collective or send on its axis's slowest group; 0 on a group of one rank."""
        axis, operation, nbytes = message
        if axis == "pp" and operation == "send":
            stages = range(self.sizes.pp - 1)
            return max((self.stage_s(nbytes, one, one + 1) for one in stages), default=0.0)
        cost = self._cost(axis)
        if cost.group.ranks == 1:
            return 0.0
        return SECONDS.get(operation, one_pass)(nbytes, cost)

    def hop_s(self, nbytes: float, axis: str) -> float:
        """Seconds in which every rank of a ring sends `nbytes` to the next one."""
        cost = self._cost(axis)
        return 0.0 if cost.group.ranks == 1 else nbytes / cost.pair + cost.hop_s

    def stage_s(self, nbytes: float, source: int, target: int) -> float:
        """Seconds from one pipeline rank to another; all ranks of the node send at once."""
        if source == target:
            return 0.0
        key = source, target
        if key not in self._stages:
            self._stages[key] = self._stage(source, target)
        latency, bandwidth = self._stages[key]
        return latency + nbytes / bandwidth

    def _stage(self, source: int, target: int) -> tuple[float, float]:
        device, gpus, nics = self.device, self.device.gpus_per_node, self.device.nics_per_node
        most = leaving_at_once(self.world_size // self.sizes.pp, source, target, gpus)
        if not most:
            return 1e-6 * device.inner_latency_us, self._pair(min(gpus, self.world_size))
        own = min(nics / most, near(nics, gpus, 1))
        nic = 1e9 * device.nic_gb_per_s * device.efficiency.node
        return 1e-6 * device.node_latency_us, nic * own

    def _pair(self, ranks: int) -> float:
        """Bytes/s from one GPU of a node to another, while all `ranks` GPUs send.

        NVLinks to other GPUs do not help a pair; a bus that all share is slower with many.
        """
        inner = min(self.device.inner(2), self.device.inner(ranks))
        return 1e9 * inner * self.device.efficiency.inner

    def _cost(self, axis: str) -> GroupCost:
        if axis not in self._costs:
            self._costs[axis] = self._new_cost(axis)
        return self._costs[axis]

    def _new_cost(self, axis: str) -> GroupCost:
        device, gpus = self.device, self.device.gpus_per_node
        group = slowest_group(self.sizes, axes_of(axis), gpus, device.nics_per_node)
        inner = 1e9 * device.inner(group.inside) * device.efficiency.inner
        inner_s, node_s = 1e-6 * device.inner_latency_us, 1e-6 * device.node_latency_us
        tree_hops = (group.inside - 1) * inner_s + math.ceil(math.log2(group.nodes)) * node_s
        if group.nodes == 1:
            pass_s = (group.ranks - 1) * inner_s
            pair = self._pair(group.inside)
            return GroupCost(group, inner, inner, inner, pair, pass_s, 2 * tree_hops, inner_s)
        nic = 1e9 * device.nic_gb_per_s * device.efficiency.node
        # With one rank in a node, no message stays inside.
        bandwidth = nic * group.nics if group.inside == 1 else min(inner, nic * group.nics)
        per_rank = nic * device.nics_per_node / min(gpus, self.world_size)
        pass_s = (group.ranks - group.nodes) * inner_s + (group.nodes - 1) * node_s
        # Of a ring, one rank in each node sends to the next node.
        own = min(device.nics_per_node / group.sharing, near(device.nics_per_node, gpus, 1))
        pair = nic * own if group.inside == 1 else min(self._pair(group.inside), nic * own)
        return GroupCost(group, bandwidth, per_rank, inner, pair, pass_s, 2 * tree_hops, node_s)


def one_pass(nbytes: float, cost: GroupCost) -> float:
    """Seconds of an all-gather, reduce-scatter or broadcast on a ring."""
    return nbytes / cost.bandwidth + cost.pass_s


def all_reduce(nbytes: float, cost: GroupCost) -> float:
    """Seconds of an all-reduce: the faster of NCCL's ring (two passes) and its tree."""
    ranks = cost.group.ranks
    tree = nbytes * ranks / (ranks - 1) / cost.bandwidth + cost.tree_s
    return min(nbytes / cost.bandwidth + 2 * cost.pass_s, tree)


def all_to_all(nbytes: float, cost: GroupCost) -> float:
    """Seconds of an all-to-all: inside the node and across nodes at the same time."""
    group = cost.group
    part = nbytes / (group.ranks - 1)
    inside = part * (group.inside - 1) / cost.inner
    across = part * (group.ranks - group.inside) / cost.per_rank
    return max(inside, across) + cost.pass_s


def ring_hops(nbytes: float, cost: GroupCost) -> float:
    """Seconds of all hops of ring attention, one after the other, if nothing hides them."""
    return nbytes / cost.pair + (cost.group.ranks - 1) * cost.hop_s


def one_send(nbytes: float, cost: GroupCost) -> float:
    """Seconds of a message to the next rank of the group."""
    return nbytes / cost.pair + cost.hop_s


SECONDS = {
    "all-gather": one_pass,
    "reduce-scatter": one_pass,
    "broadcast": one_pass,
    "all-reduce": all_reduce,
    "all-to-all": all_to_all,
    "ring": ring_hops,
    "send": one_send,
}


def fills_nodes(ranks: int, device: Device) -> bool:
    """True for fewer ranks than a node has GPUs, and for full nodes."""
    return ranks <= device.gpus_per_node or ranks % device.gpus_per_node == 0


def axes_of(name: str) -> tuple[str, ...]:
    """The mesh axes of a group that the dry run's traffic names, such as "dp_shard x cp"."""
    found = FLATTENED.get(name) or tuple(name.split(" x "))
    assert set(found) <= set(AXES), f"{name} is no axis of the mesh"
    return found


@functools.lru_cache(maxsize=2**14)
def leaving_at_once(ranks: int, source: int, target: int, gpus: int) -> int:
    """Ranks that send through the NICs of one node at once, from a stage of `ranks` to another.

    0 if the stages are on one node.
    """
    if ranks % gpus == 0:
        return gpus
    if gpus % ranks == 0:
        return 0 if source * ranks // gpus == target * ranks // gpus else ranks
    pairs = [
        ((source * ranks + one) // gpus, (target * ranks + one) // gpus) for one in range(ranks)
    ]
    leaving = [pair for pair in pairs if pair[0] != pair[1]]
    ends = (
        *Counter(pair[0] for pair in leaving).values(),
        *Counter(pair[1] for pair in leaving).values(),
    )
    return max(ends, default=0)


def near(nics: int, gpus: int, ranks: int) -> float:
    """NICs that `ranks` GPUs of a node are near to: each GPU has its share, at least one NIC."""
    return min(nics, ranks * max(1.0, nics / gpus))


@functools.lru_cache(maxsize=2**14)
def slowest_group(sizes: AxisSizes, axes: tuple[str, ...], gpus: int, nics: int) -> AxisGroup:
    """The group over these axes with the fewest NICs for itself; `gpus` and `nics` of a node."""
    parts = strides(sizes, axes)
    ranks, world = math.prod(size for _, size in parts), math.prod(asdict(sizes).values())
    if world <= gpus:
        return AxisGroup(ranks, ranks, 1, 0, math.inf)
    if len(parts) == 1:
        [(stride, size)] = parts
        # Ranks of a group in a node, where nodes and groups end together.
        inside = max(1, min(size, gpus // stride))
        if all(divides(*pair) for pair in ((stride, gpus), (stride * size, gpus), (world, gpus))):
            sharing = 0 if inside == size else gpus // inside
            own = min(nics / sharing, near(nics, gpus, inside)) if sharing else math.inf
            return AxisGroup(size, inside, size // inside, sharing, own)
    return slowest_of(members(parts, world), gpus, nics)


def divides(first: int, second: int) -> bool:
    """True if one divides the other."""
    return first % second == 0 or second % first == 0


def strides(sizes: AxisSizes, axes: tuple[str, ...]) -> list[tuple[int, int]]:
    """(distance of neighbours, ranks) along each axis above 1, neighbouring axes as one."""
    found: list[tuple[int, int]] = []
    stride = 1
    for axis in reversed(AXES):
        size = getattr(sizes, axis)
        if axis in axes and size > 1:
            if found and found[-1][0] * found[-1][1] == stride:
                found[-1] = (found[-1][0], found[-1][1] * size)
            else:
                found.append((stride, size))
        stride *= size
    return found or [(1, 1)]


def members(parts: Sequence[tuple[int, int]], world: int) -> list[list[int]]:
    """The ranks of every group."""
    group = [0]
    for stride, size in parts:
        group = [rank + stride * one for rank in group for one in range(size)]
    # A rank is the first of its group if it is at 0 along every part.
    firsts = (rank for rank in range(world) if not any(rank // step % size for step, size in parts))
    return [[first + rank for rank in group] for first in firsts]


def slowest_of(groups: Sequence[Sequence[int]], gpus: int, nics: int) -> AxisGroup:
    """`slowest_group` rank by rank: groups may differ where they do not divide the nodes."""
    held = [Counter(rank // gpus for rank in group) for group in groups]
    leaving = Counter(node for nodes in held if len(nodes) > 1 for node in nodes)
    found = []
    for nodes in held:
        ranks, inside = sum(nodes.values()), max(nodes.values())
        if len(nodes) == 1:
            found.append(AxisGroup(ranks, inside, 1, 0, math.inf))
            continue
        own = min(min(nics / leaving[node], near(nics, gpus, nodes[node])) for node in nodes)
        sharing = max(leaving[node] for node in nodes)
        found.append(AxisGroup(ranks, inside, len(nodes), sharing, own))
    return min(found, key=lambda group: (group.nics, -group.nodes, group.inside))
