"""Counts that follow from others: of any microbatch size and any cp.

A rehearsal takes a second, and a search asks for hundreds. Every number of a part is linear in the
microbatch size, and, of a given cp method, in 1 / cp. The exceptions have laws of their own: the
blocks of a ring, and the bytes of an all-to-all. So two rehearsed sizes give all others. What a
search ends with is rehearsed at its own size (`Derived.exact`), which checks the derived counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from titan_dit.parallel.mesh import AxisSizes
from titan_dit.plan import RunPlan
from titan_dit.planner.work import Attention, Counts, Message, Part, Product, Work

Item = TypeVar("Item", Product, Attention, Message)
CountsOf = Callable[[RunPlan], Counts]
SIZES = (2, 3)
"""Rehearsed microbatch sizes: those that `counts.py` compares."""
FLOAT8_SIZES = ((2, 3), (8, 9), (32, 33))
"""The same with float8, which only large products use: for sizes up to twice the first one."""
SLICES = (2, 4)
"""Rehearsed cp."""
UNSLICED = (1, *SLICES)


class OtherOperatorsError(Exception):
    """Two rehearsals ran other operators, such as products in float8 for large sizes alone."""


class Derived:
    """Counts of all plans of a config, from few rehearsals."""

    def __init__(self, exact: CountsOf) -> None:
        """`exact`: counts from a rehearsal."""
        self.exact = exact
        self.rehearsed: dict[tuple[Any, ...], Counts] = {}
        self.found: dict[tuple[Any, ...], Counts] = {}

    def counts(self, plan: RunPlan) -> Counts:
        """Counts of a plan's split, formats, recomputation and microbatch size."""
        size, cp = plan.microbatch_size, plan.sizes.cp
        key = *split_of(plan), cp, size
        if key not in self.found:
            try:
                self.found[key] = self._derived(plan, cp, size)
            except OtherOperatorsError:
                self.found[key] = self.exact(alone(plan, cp, size))
        return self.found[key]

    def _derived(self, plan: RunPlan, cp: int, size: int) -> Counts:
        if cp in UNSLICED:
            return self._of_size(plan, cp, size)
        few, many = (self._of_size(plan, slices, size) for slices in SLICES)
        return sliced(few, many, cp)

    def _of_size(self, plan: RunPlan, cp: int, size: int) -> Counts:
        first, second = sizes_for(plan, size)
        small, large = (self._rehearsed(plan, cp, each) for each in (first, second))
        return between(small, large, (size - first) / (second - first))

    def _rehearsed(self, plan: RunPlan, cp: int, size: int) -> Counts:
        key = *split_of(plan), cp, size
        if key not in self.rehearsed:
            self.rehearsed[key] = self.exact(alone(plan, cp, size))
        return self.rehearsed[key]


def sizes_for(plan: RunPlan, size: int) -> tuple[int, int]:
    """The microbatch sizes from which `size` follows."""
    if plan.precision.float8 == "off":
        return SIZES
    return next((pair for pair in FLOAT8_SIZES if size < 2 * pair[0]), FLOAT8_SIZES[-1])


def split_of(plan: RunPlan) -> tuple[Any, ...]:
    """What counts depend on, but for cp and the microbatch size."""
    method = plan.parallel.cp_method if plan.sizes.cp > 1 else ""
    sequence = plan.parallel.sequence_parallel and plan.sizes.tp > 1
    return plan.sizes.tp, method, sequence, plan.remat.mode, plan.precision.float8


def alone(plan: RunPlan, cp: int, size: int) -> RunPlan:
    """The plan of one data-parallel rank without a pipeline, with one microbatch of `size`."""
    sizes = AxisSizes(tp=plan.sizes.tp, cp=cp)
    return replace(
        plan,
        sizes=sizes,
        world_size=sizes.model,
        global_batch_size=size,
        wanted_microbatch_size=size,
    )


def between(first: Counts, second: Counts, x: float) -> Counts:
    """Counts that are linear in x: `first` at 0, `second` at 1."""
    counts: Counts = combined(first, second, lambda a, b: a + x * (b - a))
    return counts


def sliced(few: Counts, many: Counts, cp: int) -> Counts:
    """Counts of `cp` slices from those of `SLICES`."""
    c, d = SLICES
    x = (1 / cp - 1 / c) / (1 / d - 1 / c)
    found = between(few, many, x)

    def ring(item: Attention) -> Attention:
        return item if item.ring == 1 else item._replace(ring=cp)

    def exchanged(item: Message, of_few: Message) -> Message:
        if item.axis != "cp" or item.operation != "all-to-all":
            return item
        # A rank keeps 1 / cp of its 1 / cp of the tokens.
        return item._replace(bytes=of_few.bytes * ((cp - 1) / cp**2) / ((c - 1) / c**2))

    def of_work(work: Work, own: Work) -> Work:
        messages = zip(work.messages.items(), own.messages, strict=True)
        return replace(
            work,
            attention={ring(item): count for item, count in work.attention.items()},
            messages={exchanged(item, first): count for (item, count), first in messages},
        )

    def of_part(part: Part, own: Part) -> Part:
        forward, backward = of_work(part.forward, own.forward), of_work(part.backward, own.backward)
        return replace(part, forward=forward, backward=backward)

    return replace(
        found,
        embed=of_part(found.embed, few.embed),
        block=of_part(found.block, few.block),
        head=of_part(found.head, few.head),
    )


def combined(first: Any, second: Any, law: Callable[[float, float], float]) -> Any:
    """`law` of every number of two counts, parts or works of equal operators."""
    found: dict[str, Any] = {}
    for f in fields(first):
        a, b = getattr(first, f.name), getattr(second, f.name)
        if isinstance(a, Part | Work):
            found[f.name] = combined(a, b, law)
        elif isinstance(a, Mapping):
            found[f.name] = items(a, b, law)
        else:
            found[f.name] = law(a, b)
    return type(first)(**found)


def items(
    first: Mapping[Item, float], second: Mapping[Item, float], law: Callable[[float, float], float]
) -> dict[Item, float]:
    """`law` of every number of the operators and of how often they run."""
    found: dict[Item, float] = {}
    if len(first) != len(second):
        raise OtherOperatorsError
    for (a, times), (b, others) in zip(first.items(), second.items(), strict=True):
        item = type(a)(*(number(x, y, law) for x, y in zip(a, b, strict=True)))
        found[item] = found.get(item, 0) + law(times, others)
    return found


def number(a: Any, b: Any, law: Callable[[float, float], float]) -> Any:
    """`law` of two numbers; text and booleans are equal."""
    if isinstance(a, bool | str):
        if a != b:
            raise OtherOperatorsError
        return a
    return a if a == b else law(a, b)
