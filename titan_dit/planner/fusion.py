"""Bytes that a list of operators moves: each one a kernel, or neighbours fused.

Fused, elementwise operators and reductions between two others (products, attention, collectives)
that share data form one kernel. Only what it reads from outside moves, once, and what others read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from titan_dit.planner.oplog import Access, Operator

APART = ("aten::cat", "aten::_fused_", "aten::embedding_dense_backward", "aten::sort")
"""Operators that are kernels of their own, by their beginnings."""


def moved(operator: Operator) -> float:
    """Bytes of an operator that only moves them; in place both ways, an input once."""
    if operator.work is not None:
        return 0.0
    return sum(access.bytes for access in (*operator.reads, *operator.writes))


@dataclass
class Kernel:
    """A group of operators."""

    level: int
    reads: dict[Access, None] = field(default_factory=dict)
    writes: dict[Access, None] = field(default_factory=dict)


def fused(operators: Sequence[Operator], later: Iterable[int] = ()) -> tuple[float, int]:
    """(bytes, kernels) of one pass; `later`: storages that are read after it."""
    levels: dict[int, int] = {}
    group_of: dict[int, int] = {}
    members: dict[int, list[Operator]] = {}
    seen: dict[tuple[int, int], int] = {}
    outside = set(later)
    total, kernels = 0.0, 0
    for number, operator in enumerate(operators):
        storages = [access.storage for access in operator.reads]
        level = max((levels.get(storage, 0) for storage in storages), default=0)
        if not can_fuse(operator):
            kernels += 1
            total += moved(operator)
            outside.update(storages)
            for access in operator.writes:
                levels[access.storage] = level + 1
            continue
        near = {group_of[s] for s in storages if s in group_of and levels.get(s, 0) == level}
        near |= {seen[level, s] for s in storages if (level, s) in seen}
        first = min(near, default=number)
        for other in near - {first}:
            merge(members, first, other)
            for mapping in (group_of, seen):
                relabel(mapping, other, first)
        members.setdefault(first, []).append(operator)
        seen |= {(level, storage): first for storage in storages}
        for access in operator.writes:
            after = level if operator.last_dim else level + 1
            levels[access.storage] = after
            group_of[access.storage] = first
    for group in members.values():
        made = {access.storage for operator in group for access in operator.writes}
        inside = {id(operator) for operator in group}
        needed = outside | {
            access.storage
            for operator in operators
            if id(operator) not in inside
            for access in operator.reads
        }
        reads = {a for o in group for a in o.reads if a.storage not in made}
        writes = {a for o in group for a in o.writes if a.storage in needed}
        total += sum(access.bytes for access in reads | writes)
    return total, kernels + len(members)


def can_fuse(operator: Operator) -> bool:
    """True for elementwise operators, reductions and copies."""
    return operator.work is None and not operator.name.startswith(APART)


def merge(members: dict[int, list[Operator]], first: int, other: int) -> None:
    """Move a group's operators to another one."""
    members.setdefault(first, []).extend(members.pop(other, ()))


def relabel(mapping: dict, old: int, new: int) -> None:  # type: ignore[type-arg]
    """Replace a value."""
    for key, value in mapping.items():
        if value == old:
            mapping[key] = new


def kept_between(
    operators: Mapping[tuple[str, str], Sequence[Operator]], part: str, which: str
) -> set[int]:
    """Storages that are read by another pass than this one."""
    return {
        access.storage
        for key, found in operators.items()
        if key != (part, which)
        for operator in found
        for access in operator.reads
    }
