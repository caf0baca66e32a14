"""A part at any microbatch size, from rehearsals of two sizes: all its numbers are linear."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from titan_dit.planner.chain import Change, Pass, Trace
from titan_dit.planner.oplog import Access, Operator
from titan_dit.planner.work import Product

Line: TypeAlias = Callable[[float, float], float]
"""(number at the first size, number at the second) -> number at the wanted size."""


def interpolated(first: Trace, second: Trace, sizes: tuple[int, int], size: int) -> Trace:
    """The trace of `size` samples, which may lie beyond `sizes`, those of the two traces."""
    share = (size - sizes[0]) / (sizes[1] - sizes[0])

    def line(one: float, two: float) -> float:
        return one + share * (two - one)

    return replace(
        first,
        forward=passed(first.forward, second.forward, line),
        backward=passed(first.backward, second.backward, line),
        carried=line(first.carried, second.carried),
    )


def passed(one: Pass, two: Pass, line: Line) -> Pass:
    """One pass; its operators are equal but for their sizes."""
    operators = zip(one.operators, two.operators, strict=True)
    changes = zip(one.changes, two.changes, strict=True)
    return Pass(
        [operator(first, second, line) for first, second in operators],
        [Change(line(a.bytes, b.bytes), a.is_gradient) for a, b in changes],
    )


def operator(one: Operator, two: Operator, line: Line) -> Operator:
    """One operator."""
    assert one.name == two.name, f"{one.name} at one microbatch size, {two.name} at another"
    return one._replace(
        reads=accesses(one.reads, two.reads, line),
        writes=accesses(one.writes, two.writes, line),
        work=work(one.work, two.work, line),
    )


def accesses(one: Sequence[Access], two: Sequence[Access], line: Line) -> tuple[Access, ...]:
    """What an operator reads or writes."""
    pairs = zip(one, two, strict=True)
    return tuple(
        Access(a.storage, line(a.offset, b.offset), line(a.bytes, b.bytes)) for a, b in pairs
    )


def work(one: Any, two: Any, line: Line) -> Any:
    """What an operator computes or sends: a tuple of numbers and words, or None."""
    if one is None:
        return None
    pairs = zip(one, two, strict=True)
    return type(one)(*(line(a, b) if is_number(a) else a for a, b in pairs))


def is_number(value: object) -> bool:
    """True for what may depend on the microbatch."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def with_weight_gradients(own: Trace, other: Trace) -> Trace:
    """Mark backward's products of which only the dim that they sum over grows with the microbatch.

    `other`: the same part at another microbatch size.
    """
    theirs = iter([o.work for o in other.backward.operators if isinstance(o.work, Product)])
    marked = []
    for each in own.backward.operators:
        if isinstance(mine := each.work, Product):
            its = next(theirs)
            is_gradient = mine.k != its.k and mine[:3] == its[:3]
            each = each._replace(work=mine._replace(is_weight_gradient=is_gradient))
        marked.append(each)
    return replace(own, backward=replace(own.backward, operators=marked))
