"""Counts that follow from others: of any microbatch size, any cp, and of [remat] with a ring.

A rehearsal takes a second, and a search asks for hundreds. Every number of a part is linear in the
microbatch size, so two rehearsed sizes give all others; only a head that scores its logits in
chunks is rehearsed at each number of tokens. With more slices of a sample a rank does the work of
cp 2 on as many tokens; rings and all-to-alls have laws of their own. What [remat] adds with a ring
is what it adds without, and the ring again where attention runs again. What a search ends with is
rehearsed at its own size, cp and mode (`Derived.exact`), which checks the derived counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from titan_dit.kernels.cross_entropy import CHUNK_ON_DEVICE
from titan_dit.parallel.mesh import AxisSizes
from titan_dit.plan import RunPlan
from titan_dit.planner.counts import LARGE, SIZES, float8_sizes
from titan_dit.planner.work import Attention, Counts, Message, Moments, Part, Product, Work

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
                found = self._derived(plan, cp, size)
            except OtherOperatorsError:
                found = self.exact(alone(plan, cp, size))
            if self._changes_chunks(plan, cp, size, found.head):
                found = replace(found, head=self._head(plan, cp, size))
            self.found[key] = found
        return self.found[key]

    def _changes_chunks(self, plan: RunPlan, cp: int, size: int, head: Part) -> bool:
        """Whether only some of the rehearsed sizes and this one score their logits in chunks.

        Then the numbers of the head are not linear.
        """
        own = max((product.m * product.n for product in head.forward.products), default=0.0)
        as_many = size if cp == 1 else size * SLICES / cp
        sizes = SIZES
        if plan.precision.float8 != "off":
            sizes = float8_sizes(alone(plan, cp, LARGE))[0], 2 * LARGE
        logits = [own * each / as_many for each in (*sizes, as_many)]
        return min(logits) <= CHUNK_ON_DEVICE < max(logits)

    def _head(self, plan: RunPlan, cp: int, size: int) -> Part:
        """The head at its own size; neither [remat] nor float8 changes it."""
        precision = replace(plan.precision, float8="off")
        plain = replace(plan, precision=precision, remat=replace(plan.remat, mode="none"))
        as_many = size * SLICES / cp
        if cp > SLICES and as_many.is_integer():
            return sliced(self._rehearsed(plain, SLICES, int(as_many)), cp).head
        return self._rehearsed(plain, cp, size).head

    def _derived(self, plan: RunPlan, cp: int, size: int) -> Counts:
        if cp == 1:
            return self._of_size(plan, cp, size)
        # All-to-alls copy what they send: that is kept or not, as the mode says.
        if plan.remat.mode != "none" and plan.parallel.cp_method == "ring":
            silent = replace(plan, remat=replace(plan.remat, mode="none"))
            slices = self.counts(alone(silent, cp, size))
            remat, none = (self._of_size(each, 1, size / cp) for each in (plan, silent))
            return with_remat(slices, remat, none)
        if cp == SLICES:
            return self._of_size(plan, cp, size)
        # As many tokens; but the objective prepares whole samples, and keeps whole constants.
        halves = self._of_size(plan, SLICES, size * SLICES / cp)
        of_samples, whole = (self._of_size(plan, each, size) for each in (SLICES, 1))
        return replace(
            sliced(halves, cp),
            prepare=of_samples.prepare,
            inputs=halves.inputs * SLICES / cp,
            static=whole.static + (halves.static - whole.static) * SLICES / cp,
        )

    def _of_size(self, plan: RunPlan, cp: int, size: float) -> Counts:
        if plan.precision.float8 == "off":
            return self._between(plan, cp, SIZES, size)
        pair = float8_sizes(alone(plan, cp, LARGE))
        try:
            return self._between(plan, cp, pair, size)
        except OtherOperatorsError:
            is_small = pair[0] < LARGE and size / cp < LARGE // 4
            return self._between(plan, cp, (2, 4) if is_small else (LARGE, 2 * LARGE), size)

    def _between(self, plan: RunPlan, cp: int, sizes: tuple[int, int], size: float) -> Counts:
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


def with_remat(slices: Counts, remat: Counts, silent: Counts) -> Counts:
    """Counts of slices with [remat]: what `remat` has above `silent`, both of as many tokens.

    Where it runs attention again, it runs and sends again what cp adds to the forward, too.
    """

    def part(own: Part, more: Part, less: Part) -> Part:
        added, runs = more.backward - less.backward, sum(less.forward.attention.values())
        again = sum(added.attention.values()) / runs if runs else 0.0
        sent = of_slices(own.forward, less.forward).times(again)
        return replace(
            own,
            forward=own.forward + (more.forward - less.forward),
            backward=own.backward + replace(added, attention={}) + sent,
            kept=more.kept + (own.kept - less.kept) * (1 - again),
            forward_peak=own.forward_peak + more.forward_peak - less.forward_peak,
            backward_peak=own.backward_peak + more.backward_peak - less.backward_peak,
            backward_gradients=own.backward_gradients
            + (more.backward_gradients - less.backward_gradients),
            moments=None,
        )

    return replace(
        slices,
        embed=part(slices.embed, remat.embed, silent.embed),
        block=part(slices.block, remat.block, silent.block),
        head=part(slices.head, remat.head, silent.head),
    )


def of_slices(forward: Work, whole: Work) -> Work:
    """What is of cp in a forward: attention, its messages, and what `whole` does not move."""
    return Work(
        attention=forward.attention,
        messages={one: count for one, count in forward.messages.items() if one.axis == "cp"},
        moved=forward.moved - whole.moved,
        fused=forward.fused - whole.fused,
        operators=forward.operators - whole.operators,
        kernels=forward.kernels - whole.kernels,
    )


def sliced(halves: Counts, cp: int) -> Counts:
    """Counts of `cp` slices from those of `SLICES` of fewer samples, which have as many tokens."""
    share = SLICES / cp

    def attention(item: Attention) -> Attention:
        item = item._replace(batch=item.batch / share)
        if item.ring == 1:
            return item._replace(heads=item.heads * share)
        return item._replace(queries=item.queries * share, ring=cp)

    def message(item: Message) -> Message:
        law = 1.0
        if item.axis == "cp" and item.operation == "ring":
            law = (cp - 1) / (SLICES - 1)
        elif item.axis == "cp":
            # A rank keeps 1 / cp of what it has.
            law = (1 - 1 / cp) / (1 - 1 / SLICES)
        return item._replace(bytes=item.bytes * law)

    def work(own: Work) -> Work:
        return replace(
            own,
            attention={attention(item): count for item, count in own.attention.items()},
            messages={message(item): count for item, count in own.messages.items()},
        )

    def part(own: Part) -> Part:
        return replace(own, forward=work(own.forward), backward=work(own.backward))

    return replace(
        halves, embed=part(halves.embed), block=part(halves.block), head=part(halves.head)
    )


def combined(first: Any, second: Any, law: Callable[[float, float], float]) -> Any:
    """`law` of every number of two counts, parts or works of equal operators."""
    found: dict[str, Any] = {}
    for f in fields(first):
        a, b = getattr(first, f.name), getattr(second, f.name)
        if isinstance(a, Moments):
            found[f.name] = moments(a, b, law)
        elif a is None:
            found[f.name] = None
        elif isinstance(a, Part | Work):
            found[f.name] = combined(a, b, law)
        elif isinstance(a, Mapping):
            found[f.name] = items(a, b, law)
        else:
            found[f.name] = law(a, b)
    if moved := found.get("moments"):
        found |= moved.peaks(found["kept"])
    return type(first)(**found)


def moments(
    first: Moments, second: Moments | None, law: Callable[[float, float], float]
) -> Moments | None:
    """`law` of every moment; None if there are others."""
    if second is None or [*map(len, first)] != [*map(len, second)]:
        return None
    return Moments(*(tuple(map(law, a, b)) for a, b in zip(first, second, strict=True)))


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
