"""Bytes that operators move: each one a kernel, or neighbours fused into one.

Fused, operators that only move bytes (elementwise, reductions, copies) form a kernel with those
whose results or inputs they share, unless a third operator has to run between them. A kernel reads
what others made, each part once, and writes what others read. What only backward's kernels read of
a kernel of forward is computed again there, if that moves less than to write and to read it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from titan_dit.planner.oplog import Access, Operator

APART = ("fused_", "sort", "embedding_dense_backward", "foreach_norm")
"""Operators that are kernels of their own, by their beginnings."""


def moved(operator: Operator) -> float:
    """Bytes of an operator that only moves them; what it changes in place counts twice."""
    if operator.work is not None:
        return 0.0
    return sum(access.bytes for access in (*operator.reads, *operator.writes))


def can_fuse(operator: Operator) -> bool:
    """True for elementwise operators, reductions and copies."""
    return operator.work is None and not operator.name.startswith(APART)


@dataclass
class Kernel:
    """Fused operators of one pass, in their order."""

    operators: list[Operator]
    reads: dict[Access, None] = field(default_factory=dict)
    made: set[int] = field(default_factory=set)
    """Storages that it writes."""
    dropped: set[int] = field(default_factory=set)
    """Those of them that backward computes again."""

    def __post_init__(self) -> None:
        """Find what it reads from outside."""
        for operator in self.operators:
            for access in operator.reads:
                if access.storage not in self.made:
                    self.reads[access] = None
            self.made |= {access.storage for access in operator.writes}

    def sources(self, storage: int) -> dict[Access, None]:
        """What it reads to compute one of the storages that it writes."""
        wanted, found = {storage}, dict[Access, None]()
        for operator in reversed(self.operators):
            if any(access.storage in wanted for access in operator.writes):
                for access in operator.reads:
                    if access.storage in self.made:
                        wanted.add(access.storage)
                    else:
                        found[access] = None
        return found

    def bytes(self, needed: set[int]) -> float:
        """What it moves if others read the storages `needed`."""
        written = {
            access
            for operator in self.operators
            for access in operator.writes
            if access.storage in needed and access.storage not in self.dropped
        }
        return sum(access.bytes for access in (*written, *self.reads))


def fused(
    passes: Mapping[str, Sequence[Operator]], later: set[int]
) -> dict[str, tuple[float, int]]:
    """(bytes, kernels) of the passes of a part: "forward" and "backward", or another one.

    `later`: storages that are read outside these passes. What nothing reads is a result: written.
    """
    kernels = {name: [*kernels_of(operators)] for name, operators in passes.items()}
    others = [o for operators in passes.values() for o in operators if not can_fuse(o)]
    barred = later | {access.storage for operator in others for access in operator.reads}
    if {"forward", "backward"} <= kernels.keys():
        compute_again(kernels["forward"], kernels["backward"], barred)
    every = [kernel for some in kernels.values() for kernel in some]
    readers: dict[int, int] = {}
    for kernel in every:
        for storage in {access.storage for access in kernel.reads}:
            readers[storage] = readers.get(storage, 0) + 1
    inner = {a.storage for k in every for o in k.operators for a in o.reads if a.storage in k.made}
    results = {s for k in every for s in k.made if s not in inner}
    # What was there before and is changed in place.
    results |= {a.storage for k in every for a in k.reads if a.storage in k.made}
    needed = barred | readers.keys() | results
    return {
        name: (
            sum(kernel.bytes(needed) for kernel in kernels[name])
            + sum(moved(operator) for operator in operators if not can_fuse(operator)),
            len(kernels[name]) + sum(not can_fuse(operator) for operator in operators),
        )
        for name, operators in passes.items()
    }


def compute_again(forward: Sequence[Kernel], backward: Sequence[Kernel], barred: set[int]) -> None:
    """Let backward's kernels read what forward's read, in place of what forward's made."""
    for kernel in forward:
        read = {a.storage for other in forward if other is not kernel for a in other.reads}
        for access in dict.fromkeys(access for o in kernel.operators for access in o.writes):
            storage = access.storage
            users = [u for u in backward if any(a.storage == storage for a in u.reads)]
            if not users or storage in barred or storage in read or storage in kernel.dropped:
                continue
            sources = kernel.sources(storage)
            more = sum(a.bytes for user in users for a in sources if a not in user.reads)
            if more < access.bytes * (1 + len(users)):
                kernel.dropped.add(storage)
                for user in users:
                    kept = {a: None for a in user.reads if a.storage != storage}
                    user.reads = kept | sources


class Graph:
    """Operators and what must run before what, as bits of integers."""

    def __init__(self, operators: Sequence[Operator]) -> None:
        # A reduction over other dims than the last ends its kernel: its result has a node.
        count = len(operators)
        self.above = [0] * (2 * count)
        """By node: those that must run before."""
        self.below = [0] * (2 * count)
        self.members = [1 << number for number in range(2 * count)]
        """By first node of a kernel: the nodes of the kernel."""
        self.joined = [*range(2 * count)]
        """By node: one of its kernel, at the end the first."""
        self.firsts = (1 << 2 * count) - 1
        """First nodes of kernels; the others' entries of `above` and `below` are of no use."""
        writer: dict[int, int] = {}
        readers: dict[int, list[int]] = {}
        for number, operator in enumerate(operators):
            for access in operator.reads:
                if access.storage in writer:
                    self.order(writer[access.storage], number)
                readers.setdefault(access.storage, []).append(number)
            for access in operator.writes:
                for reader in readers.pop(access.storage, ()):
                    if reader != number:
                        self.order(reader, number)
            result = number
            if not operator.last_dim:
                result = count + number
                self.order(number, result)
            writer |= {access.storage: result for access in operator.writes}

    def order(self, first: int, second: int) -> None:
        """Run one before the other; `second` has nothing below it yet."""
        self.above[second] |= self.above[first] | 1 << first

    def close(self) -> None:
        """Fill `below` from `above`."""
        for number, above in enumerate(self.above):
            for before in bits(above):
                self.below[before] |= 1 << number

    def first(self, node: int) -> int:
        """The first node of a node's kernel."""
        while self.joined[node] != node:
            node = self.joined[node]
        return node

    def join(self, one: int, two: int) -> bool:
        """Put two nodes into one kernel, unless a third one has to run between them."""
        first, second = sorted((self.first(one), self.first(two)))
        if first == second:
            return True
        both = self.members[first] | self.members[second]
        if ((self.below[first] & self.above[second]) | (self.below[second] & self.above[first])) & (
            ~both
        ):
            return False
        above = (self.above[first] | self.above[second]) & ~both
        below = (self.below[first] | self.below[second]) & ~both
        self.members[first], self.above[first], self.below[first] = both, above, below
        self.joined[second], self.firsts = first, self.firsts & ~(1 << second)
        for node in bits(above & self.firsts):
            self.below[node] |= below | both
        for node in bits(below & self.firsts):
            self.above[node] |= above | both
        return True


def kernels_of(operators: Sequence[Operator]) -> Iterator[Kernel]:
    """Groups the operators that can be fused, in the order of their last ones."""
    graph = Graph(operators)
    graph.close()
    makers: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    for number, operator in enumerate(operators):
        if not can_fuse(operator):
            continue
        for access in operator.reads:
            near = [makers[access.storage]] if access.storage in makers else []
            for other in near + readers.get(access.storage, [])[-1:]:
                graph.join(other, number)
            readers.setdefault(access.storage, []).append(number)
        makers |= {access.storage: number for access in operator.writes}
    done = 0
    for number, operator in enumerate(operators):
        if can_fuse(operator) and not done >> number & 1:
            kernel = graph.members[graph.first(number)]
            done |= kernel
            yield Kernel([operators[node] for node in bits(kernel)])


def bits(mask: int) -> Iterator[int]:
    """The numbers of the bits that are set."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
