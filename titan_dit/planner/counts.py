"""Counts from the code: what each part of a model computes, moves, sends and keeps.

Others are derived from few rehearsals: any microbatch size, any cp, recomputation with a ring.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import accumulate
from typing import Any, TypeAlias, TypeVar

import torch

from titan_dit.config.job import JobConfig
from titan_dit.kernels.cross_entropy import CHUNK_ON_DEVICE
from titan_dit.models.base import ModelSpec
from titan_dit.opening import example_of
from titan_dit.parallel import float8
from titan_dit.parallel.float8 import UNIT
from titan_dit.parallel.mesh import AxisSizes
from titan_dit.plan import RunPlan
from titan_dit.planner.rehearsal import (
    Access,
    Change,
    Inputs,
    Operator,
    RecordedPass,
    Rehearsal,
    Sections,
    State,
    Trace,
    blocks_by_kind,
    first_layers,
    fused,
    moved,
    rehearse,
)
from titan_dit.planner.work import (
    AllocatedBytes,
    AttentionCall,
    Counts,
    Message,
    Part,
    Product,
    Work,
)

Line: TypeAlias = Callable[[float, float], float]
"""(number at the first size, number at the second) -> number at the wanted size."""


def interpolated(first: Trace, second: Trace, sizes: tuple[int, int], size: int) -> Trace:
    """The trace of `size` samples, linear in the size, which may lie outside `sizes`.

    `sizes`: samples of the two traces.
    """
    share = (size - sizes[0]) / (sizes[1] - sizes[0])

    def line(one: float, two: float) -> float:
        return one + share * (two - one)

    return replace(
        first,
        forward=passed(first.forward, second.forward, line),
        backward=passed(first.backward, second.backward, line),
        carried=line(first.carried, second.carried),
        storages=tuple(map(line, first.storages, second.storages)),
    )


def passed(one: RecordedPass, two: RecordedPass, line: Line) -> RecordedPass:
    """The pass at the wanted size; the two passes differ in sizes only."""
    operators = zip(one.operators, two.operators, strict=True)
    changes = zip(one.changes, two.changes, strict=True)
    return RecordedPass(
        [operator(first, second, line) for first, second in operators],
        [Change(line(a.bytes, b.bytes), a.is_gradient) for a, b in changes],
    )


def operator(one: Operator, two: Operator, line: Line) -> Operator:
    """The operator at the wanted size."""
    assert one.name == two.name, f"{one.name} at one microbatch size, {two.name} at another"
    return one._replace(
        reads=accesses(one.reads, two.reads, line),
        writes=accesses(one.writes, two.writes, line),
        work=work(one.work, two.work, line),
    )


def accesses(one: Sequence[Access], two: Sequence[Access], line: Line) -> tuple[Access, ...]:
    """The reads or writes of an operator."""
    pairs = zip(one, two, strict=True)
    return tuple(
        Access(a.storage, line(a.offset, b.offset), line(a.bytes, b.bytes)) for a, b in pairs
    )


def work(one: Any, two: Any, line: Line) -> Any:
    """The work of an operator: a tuple of numbers and strings, or None."""
    if one is None:
        return None
    pairs = zip(one, two, strict=True)
    return type(one)(*(line(a, b) if is_number(a) else a for a, b in pairs))


def is_number(value: object) -> bool:
    """True for a value that may depend on the microbatch size."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def with_weight_gradients(own: Trace, other: Trace) -> Trace:
    """Mark the products of backward that compute weight gradients.

    They are recognised by their shape: of m, n and k only k, which is summed over, grows with the
    microbatch. `other` is the same part at another microbatch size.
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


AXES = ("tp", "cp")
"""Mesh axes whose messages are counted."""
SIZES = (2, 3)
"""Microbatch sizes to rehearse. Not 1: a dim of one element fits any stride, so that size has
other copies and views than all larger ones."""
LARGE = 16
"""float8 is for large products only: its second size is far from the first."""
FP32 = 4
CAST_BYTES = 4
"""Compiled, a float8 operand is read in bf16 twice more than `fusion` counts, which joins the casts
to what makes and uses the tensor: its maximum comes before its cast, its two layouts are written by
kernels of their own. On an H200, with the counted bytes at 0.6 of the copy rate, traced steps of
torch 2.11 need 4.1 bytes (tensorwise: XL/2, 7B) and 4.4 (rowwise: XL/2)."""


class Rehearsals:
    """Counts of a config's model under any layout; keeps what it has rehearsed."""

    def __init__(self, config: JobConfig) -> None:
        data = example_of(config)
        sections = Sections(
            objective=partial(config.objective.build, config.model, data.facts),
            fields=data.fields,
            training=config.training,
            optimizer=config.optimizer,
            ema=config.ema,
        )
        self.inputs = Inputs(sections)
        self.blocks: dict[tuple[Any, ...], Trace] = {}
        """Traces of a block of each kind, by `layout_of`, remat, microbatch size and name."""
        self.ends: dict[tuple[Any, ...], Rehearsal] = {}
        """Rehearsals of embed and head, by `layout_of` and microbatch size."""
        self.states: dict[tuple[Any, ...], Mapping[str, State]] = {}
        """Parameters and updates of the parts, by `state_key`."""
        self.chosen: dict[tuple[Any, ...], frozenset[str]] = {}
        """Results of `in_float8`."""
        self.found: dict[tuple[Any, ...], Counts] = {}

    def counts(self, plan: RunPlan) -> Counts:
        """Counts for a plan's tp, cp, sequence parallelism, remat, precision and microbatch size.

        Without FSDP and pipeline. UserError if the model cannot run like this.
        """
        key = *self.layout_of(plan), plan.activation_checkpoint, plan.microbatch_size
        if key not in self.found:
            self.found[key] = self.make(plan)
        return self.found[key]

    def make(self, plan: RunPlan) -> Counts:
        """Compute `counts`, without its cache."""
        layout, size = self.layout_of(plan), plan.microbatch_size
        sizes = sizes_of(plan)
        self.rehearse(plan, sizes)
        other = next(each for each in sizes if each != size)
        ends, reference = self.ends[*layout, size], self.ends[*layout, other]
        states, how = self.states[state_key(plan)], ends.prepare
        embed, head = (
            self.part(
                with_weight_gradients(ends.parts[name], reference.parts[name]), states[name], plan
            )
            for name in ("embed", "head")
        )
        blocks = {
            kind: self.part(self.block(plan, sizes, name), states[name], plan)
            for kind, name in blocks_by_kind(plan.spec).items()
        }
        prepared = {each: held(self.ends[*layout, each].prepare.made) for each in (size, other)}
        slope = (prepared[size] - prepared[other]) / (size - other)
        return Counts(
            embed=embed,
            blocks=blocks,
            head=head,
            prepare=work_of({"prepare": how.made.operators}, how.read)["prepare"],
            inputs=slope,
            static=prepared[size] - slope * size + how.cached,
            stream=ends.stream,
            tied=sum(state.tied for state in states.values()),
        )

    def layout_of(self, plan: RunPlan) -> tuple[Any, ...]:
        """Cache key of embed and head, without the microbatch size."""
        return *split_key(plan), plan.precision, self.in_float8(plan)

    def in_float8(self, plan: RunPlan) -> frozenset[str]:
        """Names of the linears in float8 in one block of each kind.

        They depend on the tokens of a microbatch.
        """
        precision, size = plan.precision, plan.microbatch_size
        if precision.float8 == "off":
            return frozenset()
        key = *state_key(plan), plan.device, size
        if key not in self.chosen:
            with torch.device("meta"):
                model = plan.spec.build()
            model.cut(first_layers(plan.spec).values(), is_first=False, is_last=False)
            own = plan.tensor_plan, plan.sizes, size * plan.attended_per_rank
            self.chosen[key] = frozenset(
                name
                for name, shape in float8.linears(model, *own).items()
                if float8.is_converted(shape, precision, plan.device)
            )
        return self.chosen[key]

    def rehearse(self, plan: RunPlan, sizes: Sequence[int]) -> None:
        """Rehearse the sizes that are not cached yet."""
        layout, remat, wanted = (
            self.layout_of(plan),
            plan.activation_checkpoint,
            plan.microbatch_size,
        )
        names = blocks_by_kind(plan.spec).values()
        missing = [
            each
            for each in sizes
            if any((*layout, remat, each, name) not in self.blocks for name in names)
        ]
        if (*layout, wanted) not in self.ends and wanted not in missing:
            missing.append(wanted)
        if not missing:
            return
        key = state_key(plan)
        self.states[key], found = rehearse(plan, self.inputs, missing, self.states.get(key))
        for size, rehearsal in found.items():
            self.ends[*layout, size] = rehearsal
            for name in names:
                self.blocks[*layout, remat, size, name] = rehearsal.parts[name]

    def block(self, plan: RunPlan, sizes: tuple[int, int], name: str = "blocks.0") -> Trace:
        """The trace of a block at the plan's microbatch size."""
        key, size = (*self.layout_of(plan), plan.activation_checkpoint), plan.microbatch_size
        one, two = (
            with_weight_gradients(self.blocks[*key, own, name], self.blocks[*key, other, name])
            for own, other in (sizes, sizes[::-1])
        )
        return one if size == sizes[0] else interpolated(one, two, sizes, size)

    def part(self, trace: Trace, state: State, plan: RunPlan) -> Part:
        """The counts of a part."""
        passes = {"forward": trace.forward.operators, "backward": trace.backward.operators}
        works = work_of(passes, trace.later)
        kept, allocated = held(trace.forward), allocated_bytes_of(trace)
        every = self.inputs.sections.ema.settled().every
        average = updated(state.average).times(1 / every)
        on_host = updated(state.update) + average
        return Part(
            forward=works["forward"],
            backward=works["backward"],
            update=updated(trace.reduced) + on_host + casts(state, plan),
            on_host=on_host,
            parameters=state.parameters,
            trained=state.trained,
            buffers=state.buffers,
            quantized=state.quantized,
            kept=kept,
            storages=trace.storages,
            tensors=state.tensors,
            allocated=allocated,
            **allocated.peaks(kept),
        )


def split_key(plan: RunPlan) -> tuple[Any, ...]:
    """Cache key: how tokens and weights are split within a stage and a data-parallel rank."""
    parallel, sizes = plan.parallel, plan.sizes
    method = parallel.cp_method if sizes.cp > 1 else ""
    sequence = parallel.sequence_parallel and sizes.tp > 1
    return sizes.tp, sizes.cp, sequence, method, parallel.tensor_plan


def state_key(plan: RunPlan) -> tuple[Any, ...]:
    """Cache key of the parameters and their update."""
    return *split_key(plan), plan.precision


def sizes_of(plan: RunPlan) -> tuple[int, int]:
    """Two microbatch sizes to rehearse: the plan's own, if another one's operators may differ."""
    size = plan.microbatch_size
    if plan.precision.float8 != "off":
        first, second = float8_sizes(plan)
        return size, second if size != second else first
    return (size, SIZES[0]) if size == 1 else SIZES


def float8_sizes(plan: RunPlan) -> tuple[int, int]:
    """Two microbatch sizes whose tokens are multiples of 16, as float8 needs."""
    small = SIZES[0]
    return (small, LARGE) if small * plan.attended_per_rank % UNIT == 0 else (LARGE, 2 * LARGE)


def casts(state: State, plan: RunPlan) -> Work:
    """Casts of weights to the compute dtype and of gradients from it, once a step."""
    if plan.dtype.itemsize >= FP32:
        return Work()
    nbytes = (state.parameters + state.trained) * (FP32 + plan.dtype.itemsize)
    return Work(moved=nbytes, fused=nbytes, operators=2, kernels=2)


def held(one: RecordedPass) -> float:
    """Bytes that a pass allocates and does not free."""
    return sum(change.bytes for change in one.changes)


def allocated_bytes_of(trace: Trace) -> AllocatedBytes:
    """The sums of a part's allocations and frees; its backward begins with what is carried."""
    backward, own = trace.backward.changes, (change.bytes for change in trace.forward.changes)
    gradients = (change.bytes * change.is_gradient for change in backward)
    return AllocatedBytes(
        forward=tuple(accumulate(own)),
        backward=tuple(accumulate((change.bytes for change in backward), initial=trace.carried)),
        gradients=tuple(accumulate(gradients, initial=0.0)),
    )


def work_of(passes: Mapping[str, Sequence[Operator]], later: Iterable[int]) -> dict[str, Work]:
    """The work of passes that share tensors; `later`: storages that are read outside of them."""
    found = fused(passes, set(later))
    return {name: summed(operators, found[name]) for name, operators in passes.items()}


def cast(product: Product) -> float:
    """Elements that are cast to float8 for a product."""
    if product.dtype != "float8":
        return 0.0
    return product.batch * product.k * (product.m + product.n)


def updated(operators: Sequence[Operator]) -> Work:
    """The work of an update, whose operators are never fused by a compiler."""
    return summed(operators, (sum(map(moved, operators)), len(operators)))


def summed(operators: Sequence[Operator], one_kernel: tuple[float, int]) -> Work:
    """The sum over operators; `one_kernel`: (bytes, kernels) if they are fused."""
    products: dict[Product, float] = {}
    attention: dict[AttentionCall, float] = {}
    messages: dict[Message, float] = {}
    for operator in operators:
        work = operator.work
        if isinstance(work, Product):
            products[work] = products.get(work, 0) + 1
        elif isinstance(work, AttentionCall):
            attention[work] = attention.get(work, 0) + 1
            if work.ring > 1:
                sent = Message("cp", "ring", (work.ring - 1) * work.hop_bytes)
                messages[sent] = messages.get(sent, 0) + 1
        elif isinstance(work, Message) and work.axis in AXES and work.bytes:
            messages[work] = messages.get(work, 0) + 1
    nbytes, kernels = one_kernel
    nbytes += CAST_BYTES * sum(count * cast(product) for product, count in products.items())
    return Work(
        products=products,
        attention=attention,
        messages=messages,
        moved=sum(map(moved, operators)),
        fused=nbytes,
        operators=len(operators),
        kernels=kernels,
    )


Item = TypeVar("Item", Product, AttentionCall, Message)
CountsOf = Callable[[RunPlan], Counts]
SLICES = 2
"""Rehearsed cp."""


class OtherOperatorsError(Exception):
    """Two rehearsals ran other operators, such as products in float8 for large sizes alone."""


class Derived:
    """Counts of any plan of a config, derived from a few rehearsals."""

    def __init__(self, exact: CountsOf) -> None:
        """`exact`: counts from a rehearsal."""
        self.exact = exact
        self.rehearsed: dict[tuple[Any, ...], Counts] = {}
        self.found: dict[tuple[Any, ...], Counts] = {}

    def counts(self, plan: RunPlan) -> Counts:
        """Counts of a plan's split, formats, recomputation and microbatch size."""
        size, cp = plan.microbatch_size, plan.sizes.cp
        key = *derived_key(plan), cp, size
        if key not in self.found:
            try:
                found = self._derived(plan, cp, size)
            except OtherOperatorsError:
                found = self.exact(one_data_rank(plan, cp, size))
            if self._changes_chunks(plan, cp, size, found.head):
                found = replace(found, head=self._head(plan, cp, size))
            self.found[key] = found
        return self.found[key]

    def _changes_chunks(self, plan: RunPlan, cp: int, size: int, head: Part) -> bool:
        """True if only some of the sizes, the rehearsed and the wanted one, score logits in chunks.

        The counts of the head are then not linear in the microbatch size.
        """
        own = max((product.m * product.n for product in head.forward.products), default=0.0)
        as_many = size if cp == 1 else size * SLICES / cp
        sizes = SIZES
        if plan.precision.float8 != "off":
            sizes = float8_sizes(one_data_rank(plan, cp, LARGE))[0], 2 * LARGE
        logits = [own * each / as_many for each in (*sizes, as_many)]
        return min(logits) <= CHUNK_ON_DEVICE < max(logits)

    def _head(self, plan: RunPlan, cp: int, size: int) -> Part:
        """The head at its own size; neither [activation_checkpoint] nor float8 changes it."""
        precision = replace(plan.precision, float8="off")
        plain = replace(
            plan,
            precision=precision,
            activation_checkpoint=replace(plan.activation_checkpoint, mode="none"),
        )
        as_many = size * SLICES / cp
        if cp > SLICES and as_many.is_integer():
            return sliced(self._rehearsed(plain, SLICES, int(as_many)), cp).head
        return self._rehearsed(plain, cp, size).head

    def _derived(self, plan: RunPlan, cp: int, size: int) -> Counts:
        if cp == 1 or has_whole_tokens(plan.spec):
            return self._of_size(plan, cp, size)
        # All-to-alls copy what they send: that is kept or not, as the mode says.
        if plan.activation_checkpoint.mode != "none" and plan.parallel.cp_method == "ring":
            silent = replace(
                plan, activation_checkpoint=replace(plan.activation_checkpoint, mode="none")
            )
            slices = self.counts(one_data_rank(silent, cp, size))
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
        pair = float8_sizes(one_data_rank(plan, cp, LARGE))
        try:
            return self._between(plan, cp, pair, size)
        except OtherOperatorsError:
            is_small = pair[0] < LARGE and size / cp < LARGE // 4
            return self._between(plan, cp, (2, 4) if is_small else (LARGE, 2 * LARGE), size)

    def _between(self, plan: RunPlan, cp: int, sizes: tuple[int, int], size: float) -> Counts:
        small, large = (self._rehearsed(plan, cp, each) for each in sizes)
        return between(small, large, (size - sizes[0]) / (sizes[1] - sizes[0]))

    def _rehearsed(self, plan: RunPlan, cp: int, size: int) -> Counts:
        key = *derived_key(plan), cp, size
        if key not in self.rehearsed:
            self.rehearsed[key] = self.exact(one_data_rank(plan, cp, size))
        return self.rehearsed[key]


def has_whole_tokens(spec: ModelSpec) -> bool:
    """True if every cp rank holds all tokens of a stream tensor, such as a text's.

    A slice of fewer samples then has as many sliced tokens, but fewer of these.
    """
    return any(len(each.shape) > 1 and each.token_dim is None for each in spec.stream.values())


def derived_key(plan: RunPlan) -> tuple[Any, ...]:
    """Cache key of derived counts, without cp and the microbatch size."""
    method = plan.parallel.cp_method if plan.sizes.cp > 1 else ""
    sequence = plan.parallel.sequence_parallel and plan.sizes.tp > 1
    return plan.sizes.tp, method, sequence, plan.activation_checkpoint.mode, plan.precision.float8


def one_data_rank(plan: RunPlan, cp: int, size: int) -> RunPlan:
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
    """Counts of slices with recomputation: `slices`, plus the difference of `remat` and `silent`.

    `remat` and `silent` have as many tokens and no cp. A pass that recomputes attention also sends
    its cp messages again.
    """

    def part(own: Part, more: Part, less: Part) -> Part:
        added, runs = more.backward - less.backward, sum(less.forward.attention.values())
        again = sum(added.attention.values()) / runs if runs else 0.0
        sent = cp_work(own.forward, less.forward).times(again)
        return replace(
            own,
            forward=own.forward + (more.forward - less.forward),
            backward=own.backward + replace(added, attention={}) + sent,
            kept=more.kept + (own.kept - less.kept) * (1 - again),
            storages=more.storages,
            forward_peak=own.forward_peak + more.forward_peak - less.forward_peak,
            backward_peak=own.backward_peak + more.backward_peak - less.backward_peak,
            backward_gradients=own.backward_gradients
            + (more.backward_gradients - less.backward_gradients),
            allocated=None,
        )

    return replace(
        slices,
        embed=part(slices.embed, remat.embed, silent.embed),
        blocks={
            kind: part(own, remat.blocks[kind], silent.blocks[kind])
            for kind, own in slices.blocks.items()
        },
        head=part(slices.head, remat.head, silent.head),
    )


def cp_work(forward: Work, whole: Work) -> Work:
    """Work that cp adds to a forward: attention, its messages, and the rest above `whole`."""
    return Work(
        attention=forward.attention,
        messages={one: count for one, count in forward.messages.items() if one.axis == "cp"},
        moved=forward.moved - whole.moved,
        fused=forward.fused - whole.fused,
        operators=forward.operators - whole.operators,
        kernels=forward.kernels - whole.kernels,
    )


def sliced(halves: Counts, cp: int) -> Counts:
    """Counts of `cp` slices, from `halves`: SLICES slices of fewer samples, with as many tokens."""
    share = SLICES / cp

    def attention(item: AttentionCall) -> AttentionCall:
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

    return halves.each(part)


def combined(first: Any, second: Any, law: Callable[[float, float], float]) -> Any:
    """Two counts, parts or works combined number by number with `law`."""
    found: dict[str, Any] = {}
    for f in fields(first):
        a, b = getattr(first, f.name), getattr(second, f.name)
        if isinstance(a, AllocatedBytes):
            found[f.name] = combined_bytes(a, b, law)
        elif a is None:
            found[f.name] = None
        elif isinstance(a, Part | Work):
            found[f.name] = combined(a, b, law)
        elif f.name == "blocks":
            found[f.name] = {kind: combined(a[kind], b[kind], law) for kind in a}
        elif isinstance(a, Mapping):
            found[f.name] = items(a, b, law)
        elif isinstance(a, tuple):
            found[f.name] = tuple(map(law, a, b))
        else:
            found[f.name] = law(a, b)
    if moved := found.get("allocated"):
        found |= moved.peaks(found["kept"])
    return type(first)(**found)


def combined_bytes(
    first: AllocatedBytes, second: AllocatedBytes | None, law: Callable[[float, float], float]
) -> AllocatedBytes | None:
    """Two sequences of bytes combined with `law`; None if their lengths differ."""
    if second is None or [*map(len, first)] != [*map(len, second)]:
        return None
    return AllocatedBytes(*(tuple(map(law, a, b)) for a, b in zip(first, second, strict=True)))


def items(
    first: Mapping[Item, float], second: Mapping[Item, float], law: Callable[[float, float], float]
) -> dict[Item, float]:
    """Two mappings of equal operators combined with `law`: their numbers, and how often they run.

    Raises OtherOperatorsError if the operators differ.
    """
    found: dict[Item, float] = {}
    if len(first) != len(second):
        raise OtherOperatorsError
    for (a, times), (b, others) in zip(first.items(), second.items(), strict=True):
        item = type(a)(*(number(x, y, law) for x, y in zip(a, b, strict=True)))
        found[item] = found.get(item, 0) + law(times, others)
    return found


def number(a: Any, b: Any, law: Callable[[float, float], float]) -> Any:
    """Two numbers combined with `law`. Raises OtherOperatorsError for unequal text or booleans."""
    if isinstance(a, bool | str):
        if a != b:
            raise OtherOperatorsError
        return a
    return a if a == b else law(a, b)
