"""Counts that follow from others: of any microbatch size, any cp, and of [remat] with cp.

A rehearsal takes a second, and a search asks for hundreds. Every number of a part is linear in the
microbatch size, so two rehearsed sizes give all others. With more slices of a sample a rank does
its share of the work of cp 2; rings and all-to-alls have laws of their own. What [remat] adds with
cp is the slice of what it adds without. What a search ends with is rehearsed at its own size, cp
and mode (`Derived.exact`), which checks the derived counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from titan_dit.parallel.mesh import AxisSizes
from titan_dit.plan import RunPlan
from titan_dit.planner.counts import LARGE, SIZES
from titan_dit.planner.work import Attention, Counts, Message, Part, Product, Work

Item = TypeVar("Item", Product, Attention, Message)
CountsOf = Callable[[RunPlan], Counts]
SLICES = 2
"""Rehearsed cp."""


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
        if cp > 1 and plan.remat.mode != "none":
            silent = replace(plan, remat=replace(plan.remat, mode="none"))
            sliced_once = self.counts(alone(silent, cp, size))
            remat, none = (self.counts(alone(each, 1, size)) for each in (plan, silent))
            return with_remat(sliced_once, remat, none, 1 / cp)
        if cp > SLICES:
            return sliced(self.counts(alone(plan, SLICES, size)), cp)
        return self._of_size(plan, cp, size)

    def _of_size(self, plan: RunPlan, cp: int, size: int) -> Counts:
        if plan.precision.float8 == "off":
            return self._between(plan, cp, SIZES, size)
        try:
            return self._between(plan, cp, (SIZES[0], LARGE), size)
        except OtherOperatorsError:
            pair = SIZES if size < LARGE // 4 else (LARGE, LARGE + 1)
            return self._between(plan, cp, pair, size)

    def _between(self, plan: RunPlan, cp: int, sizes: tuple[int, int], size: int) -> Counts:
        small, large = (self._rehearsed(plan, cp, each) for each in sizes)
        return between(small, large, (size - sizes[0]) / (sizes[1] - sizes[0]))

    def _rehearsed(self, plan: RunPlan, cp: int, size: int) -> Counts:
        key = *split_of(plan), cp, size
        if key not in self.rehearsed:
            self.rehearsed[key] = self.exact(alone(plan, cp, size))
        return self.rehearsed[key]


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


def with_remat(sliced: Counts, remat: Counts, silent: Counts, share: float) -> Counts:
    """Counts of slices with [remat]: what `remat` has above `silent`, both of whole samples."""

    def part(own: Part, more: Part, less: Part) -> Part:
        return replace(
            own,
            forward=own.forward + (more.forward - less.forward).times(share),
            backward=own.backward + (more.backward - less.backward).times(share),
            kept=own.kept + share * (more.kept - less.kept),
            forward_peak=own.forward_peak + share * (more.forward_peak - less.forward_peak),
            backward_peak=own.backward_peak + share * (more.backward_peak - less.backward_peak),
        )

    return replace(
        sliced,
        embed=part(sliced.embed, remat.embed, silent.embed),
        block=part(sliced.block, remat.block, silent.block),
        head=part(sliced.head, remat.head, silent.head),
    )


def sliced(halves: Counts, cp: int) -> Counts:
    """Counts of `cp` slices from those of `SLICES`."""
    share = SLICES / cp

    def ring(item: Attention) -> Attention:
        if item.ring == 1:
            return item._replace(heads=item.heads * share)
        queries, hop = item.queries * share, item.hop_bytes * share
        return item._replace(queries=queries, hop_bytes=hop, ring=cp)

    def message(item: Message) -> Message:
        law = share
        if item.axis == "cp" and item.operation == "ring":
            law = share * (cp - 1) / (SLICES - 1)
        elif item.axis == "cp":
            # A rank keeps 1 / cp of its 1 / cp of the tokens.
            law = ((cp - 1) / cp**2) / ((SLICES - 1) / SLICES**2)
        return item._replace(bytes=item.bytes * law)

    def work(own: Work) -> Work:
        less = own.times(share)
        return replace(
            less,
            attention={ring(item): count for item, count in own.attention.items()},
            messages={message(item): count for item, count in own.messages.items()},
            operators=own.operators,
            kernels=own.kernels,
        )

    def part(own: Part) -> Part:
        return replace(
            own,
            forward=work(own.forward),
            backward=work(own.backward),
            kept=own.kept * share,
            forward_peak=own.forward_peak * share,
            backward_peak=own.backward_peak * share,
        )

    return replace(
        halves,
        embed=part(halves.embed),
        block=part(halves.block),
        head=part(halves.head),
        stream=halves.stream * share,
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
