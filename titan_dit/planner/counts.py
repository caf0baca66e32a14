"""Counts from the code: what each part of a model computes, moves, sends and keeps.

Nothing is derived by hand: `rehearsal.py` runs the parts on fake tensors. A block is rehearsed at
two microbatch sizes, and all others follow: every number is linear. Embed and head are rehearsed at
each size, as a loss may take its tokens in chunks (`derived.py` spares that where it does not).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from titan_dit.config.job import JobConfig
from titan_dit.dry_run.command import of_data
from titan_dit.parallel import float8
from titan_dit.parallel.float8_gains import UNIT
from titan_dit.plan import RunPlan
from titan_dit.planner.chain import PARTS, Pass, Trace
from titan_dit.planner.fusion import fused, moved
from titan_dit.planner.inputs import Inputs, Sections
from titan_dit.planner.interpolate import interpolated, with_weight_gradients
from titan_dit.planner.oplog import Operator
from titan_dit.planner.rehearsal import Rehearsal, State, rehearse
from titan_dit.planner.work import Attention, Counts, Message, Moments, Part, Product, Work

AXES = ("tp", "cp")
"""Those whose messages are counted."""
SIZES = (2, 3)
"""Microbatch sizes to rehearse. Not 1: a dim of one element has any stride, so that copies and
views of other sizes differ from its."""
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
        facts, fields = config.objective.example(config.model) or of_data(config.data)
        sections = Sections(
            objective=partial(config.objective.build, config.model, facts),
            fields=fields,
            training=config.training,
            optimizer=config.optimizer,
            ema=config.ema,
        )
        self.inputs = Inputs(sections)
        self.blocks: dict[tuple[Any, ...], Trace] = {}
        """By `layout_of` and microbatch size."""
        self.ends: dict[tuple[Any, ...], Rehearsal] = {}
        """By `layout_of` without remat, and microbatch size."""
        self.states: dict[tuple[Any, ...], Mapping[str, State]] = {}
        """By tp, cp and precision."""
        self.chosen: dict[tuple[Any, ...], frozenset[str]] = {}
        """See `in_float8`."""
        self.found: dict[tuple[Any, ...], Counts] = {}

    def counts(self, plan: RunPlan) -> Counts:
        """Counts for a plan's tp, cp, sequence parallelism, remat, precision and microbatch size.

        Without FSDP and pipeline. UserError if the model cannot run like this.
        """
        key = *self.layout_of(plan), plan.remat, plan.microbatch_size
        if key not in self.found:
            self.found[key] = self.make(plan)
        return self.found[key]

    def make(self, plan: RunPlan) -> Counts:
        """See `counts`."""
        layout, size = self.layout_of(plan), plan.microbatch_size
        sizes = sizes_of(plan)
        self.rehearse(plan, sizes)
        other = next(each for each in sizes if each != size)
        ends, reference = self.ends[*layout, size], self.ends[*layout, other]
        traces = {
            part: with_weight_gradients(ends.parts[part], reference.parts[part])
            for part in ("embed", "head")
        }
        traces["block"] = self.block(plan, sizes)
        states, how = self.states[state_key(plan)], ends.prepare
        parts = {part: self.part(traces[part], states[part], plan) for part in PARTS}
        prepared = {each: held(self.ends[*layout, each].prepare.made) for each in (size, other)}
        slope = (prepared[size] - prepared[other]) / (size - other)
        return Counts(
            **parts,
            prepare=work_of({"prepare": how.made.operators}, how.read)["prepare"],
            inputs=slope,
            static=prepared[size] - slope * size + how.cached,
            stream=ends.stream,
            tied=sum(state.tied for state in states.values()),
        )

    def layout_of(self, plan: RunPlan) -> tuple[Any, ...]:
        """What embed and head depend on, but for the microbatch size."""
        return *split_of(plan), plan.precision, self.in_float8(plan)

    def in_float8(self, plan: RunPlan) -> frozenset[str]:
        """Names of a block's linears in float8, which depend on the tokens of a microbatch."""
        precision, size = plan.precision, plan.microbatch_size
        if precision.float8 == "off":
            return frozenset()
        key = *state_key(plan), plan.device, size
        if key not in self.chosen:
            with torch.device("meta"):
                model = plan.spec.build()
            model.cut(range(1), is_first=False, is_last=False)
            own = plan.tensor_plan, plan.sizes, size * plan.tokens_per_rank
            self.chosen[key] = frozenset(
                name
                for name, shape in float8.linears(model, *own).items()
                if float8.suits(shape, precision, plan.device)
            )
        return self.chosen[key]

    def rehearse(self, plan: RunPlan, sizes: Sequence[int]) -> None:
        """Rehearse what is not known yet."""
        layout, remat, wanted = self.layout_of(plan), plan.remat, plan.microbatch_size
        missing = [each for each in sizes if (*layout, remat, each) not in self.blocks]
        if (*layout, wanted) not in self.ends and wanted not in missing:
            missing.append(wanted)
        if not missing:
            return
        key = state_key(plan)
        self.states[key], found = rehearse(plan, self.inputs, missing, self.states.get(key))
        for size, rehearsal in found.items():
            self.ends[*layout, size] = rehearsal
            self.blocks[*layout, remat, size] = rehearsal.parts["block"]

    def block(self, plan: RunPlan, sizes: tuple[int, int]) -> Trace:
        """A block at the plan's microbatch size."""
        key, size = (*self.layout_of(plan), plan.remat), plan.microbatch_size
        one, two = (
            with_weight_gradients(self.blocks[*key, own], self.blocks[*key, other])
            for own, other in (sizes, sizes[::-1])
        )
        return one if size == sizes[0] else interpolated(one, two, sizes, size)

    def part(self, trace: Trace, state: State, plan: RunPlan) -> Part:
        """The counts of a part."""
        passes = {"forward": trace.forward.operators, "backward": trace.backward.operators}
        works = work_of(passes, trace.later)
        kept, moments = held(trace.forward), moments_of(trace)
        every = self.inputs.sections.ema.settled().every
        average = updated(state.average).times(1 / every)
        update = updated(trace.reduced) + updated(state.update) + average + casts(state, plan)
        return Part(
            forward=works["forward"],
            backward=works["backward"],
            update=update,
            parameters=state.parameters,
            trained=state.trained,
            buffers=state.buffers,
            kept=kept,
            tensors=state.tensors,
            moments=moments,
            **moments.peaks(kept),
        )


def split_of(plan: RunPlan) -> tuple[Any, ...]:
    """How tokens and weights are split within a stage and a data-parallel rank."""
    parallel, sizes = plan.parallel, plan.sizes
    method = parallel.cp_method if sizes.cp > 1 else ""
    sequence = parallel.sequence_parallel and sizes.tp > 1
    return sizes.tp, sizes.cp, sequence, method, parallel.tensor_plan


def state_key(plan: RunPlan) -> tuple[Any, ...]:
    """What the parameters and their update depend on."""
    return *split_of(plan), plan.precision


def sizes_of(plan: RunPlan) -> tuple[int, int]:
    """Two microbatch sizes to rehearse: the plan's own, if another one's operators may differ."""
    size = plan.microbatch_size
    if plan.precision.float8 != "off":
        first, second = float8_sizes(plan)
        return size, second if size != second else first
    return (size, SIZES[0]) if size == 1 else SIZES


def float8_sizes(plan: RunPlan) -> tuple[int, int]:
    """Two microbatch sizes with as many tokens as float8 takes: multiples of 16."""
    small = SIZES[0]
    return (small, LARGE) if small * plan.tokens_per_rank % UNIT == 0 else (LARGE, 2 * LARGE)


def casts(state: State, plan: RunPlan) -> Work:
    """Casts of weights to the compute dtype and of gradients from it, once a step."""
    if plan.dtype.itemsize >= FP32:
        return Work()
    nbytes = (state.parameters + state.trained) * (FP32 + plan.dtype.itemsize)
    return Work(moved=nbytes, fused=nbytes, operators=2, kernels=2)


def held(one: Pass) -> float:
    """Bytes that a pass allocates and does not free."""
    return sum(change.bytes for change in one.changes)


def moments_of(trace: Trace) -> Moments:
    """The sums of a part's allocations and frees; its backward begins with what is carried."""
    backward, own = trace.backward.changes, (change.bytes for change in trace.forward.changes)
    gradients = (change.bytes * change.is_gradient for change in backward)
    return Moments(
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
    attention: dict[Attention, float] = {}
    messages: dict[Message, float] = {}
    for operator in operators:
        work = operator.work
        if isinstance(work, Product):
            products[work] = products.get(work, 0) + 1
        elif isinstance(work, Attention):
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
