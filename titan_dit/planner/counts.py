"""Counts from the code: what each part of a model computes, moves, sends and keeps.

Nothing is derived by hand: `rehearsal.py` runs the parts on fake tensors. A block is rehearsed at
two microbatch sizes; all numbers in between and beyond follow from them, as every number is linear
in the microbatch. The ends are rehearsed at each size: their number of kernels depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from titan_dit.config.job import JobConfig
from titan_dit.dry_run.command import of_data
from titan_dit.plan import RunPlan
from titan_dit.planner.fusion import fused, kept_between, moved
from titan_dit.planner.oplog import Key, Operator
from titan_dit.planner.rehearsal import (
    PARTS,
    Change,
    Rehearsal,
    Sections,
    State,
    rehearse,
    states_of,
)
from titan_dit.planner.work import Attention, Counts, Message, Part, Product, Work

AXES = ("tp", "cp")
"""Those whose messages are counted."""
SIZES = (2, 3)
"""Microbatch sizes to rehearse. Not 1: a dim of one element has any stride, so that copies and
views of other sizes differ from its."""
FLOAT = 4


class Rehearsals:
    """Counts of a config's model under any layout; keeps what it has rehearsed."""

    def __init__(self, config: JobConfig) -> None:
        facts, fields = config.objective.example(config.model) or of_data(config.data)
        self.sections = Sections(
            objective=config.objective.build(config.model, facts),
            fields=fields,
            training=config.training,
            optimizer=config.optimizer,
            ema=config.ema,
        )
        self.rehearsals: dict[tuple[Any, ...], Rehearsal] = {}
        self.states: dict[tuple[Any, ...], Mapping[str, State]] = {}
        self.found: dict[tuple[Any, ...], Counts] = {}

    def counts(self, plan: RunPlan) -> Counts:
        """Counts for a plan's tp, cp, sequence parallelism, remat, precision and microbatch size.

        Without FSDP and pipeline. UserError if the model cannot run like this.
        """
        key = *layout_of(plan), plan.microbatch_size
        if key not in self.found:
            self.found[key] = self.make(plan)
        return self.found[key]

    def make(self, plan: RunPlan) -> Counts:
        """See `counts`."""
        size = plan.microbatch_size
        other = next(each for each in SIZES if each != size)
        own, reference = self.rehearsal(plan, size), self.rehearsal(plan, other)
        own = with_weight_gradients(own, reference)
        states = self.states_of(plan)
        parts = {part: part_of(part, own, states[part], plan, self.sections) for part in PARTS}
        return Counts(
            **parts,
            prepare=work_of(own.operators, "inputs", "prepare"),
            inputs=sum(change.bytes for change in own.changes["inputs", "prepare"]) / size,
            stream=own.stream,
            tied=sum(state.tied for state in states.values()),
        )

    def rehearsal(self, plan: RunPlan, size: int) -> Rehearsal:
        """Of a microbatch of `size` samples."""
        key = *layout_of(plan), size
        if key not in self.rehearsals:
            self.rehearsals[key] = rehearse(plan, self.sections, size)
        return self.rehearsals[key]

    def states_of(self, plan: RunPlan) -> Mapping[str, State]:
        """Parameters and updates by part."""
        key = plan.sizes.tp, plan.parallel.tensor_plan, plan.precision
        if key not in self.states:
            self.states[key] = states_of(plan, self.sections)
        return self.states[key]


def layout_of(plan: RunPlan) -> tuple[Any, ...]:
    """What a rehearsal depends on, but for the microbatch size."""
    parallel, sizes = plan.parallel, plan.sizes
    method = parallel.cp_method if sizes.cp > 1 else ""
    sequence = parallel.sequence_parallel and sizes.tp > 1
    return sizes.tp, sizes.cp, sequence, method, plan.remat, plan.precision, parallel.tensor_plan


def with_weight_gradients(own: Rehearsal, other: Rehearsal) -> Rehearsal:
    """Mark the products in backward whose sum alone runs over the microbatch."""
    marked = {
        key: list(operators) if key[1] != "backward" else compared(operators, other.operators[key])
        for key, operators in own.operators.items()
    }
    return replace(own, operators=marked)


def compared(own: Sequence[Operator], other: Sequence[Operator]) -> list[Operator]:
    """One pass, its weight gradients marked by another microbatch size."""
    theirs = iter([o.work for o in other if isinstance(o.work, Product)])
    found = []
    for operator in own:
        if isinstance(mine := operator.work, Product):
            its = next(theirs)
            varies = mine.k != its.k and (mine.batch, mine.m, mine.n) == its[:3]
            operator = operator._replace(work=mine._replace(is_weight_gradient=varies))
        found.append(operator)
    return found


def part_of(
    part: str, rehearsal: Rehearsal, state: State, plan: RunPlan, sections: Sections
) -> Part:
    """The counts of a part."""
    forward = [change.bytes for change in rehearsal.changes[part, "forward"]]
    backward = rehearsal.changes[part, "backward"]
    kept = sum(forward)
    peak, gradients = highest(backward)
    every = sections.ema.settled().every
    casts = cast_bytes(state, plan)
    return Part(
        forward=work_of(rehearsal.operators, part, "forward"),
        backward=work_of(rehearsal.operators, part, "backward"),
        update=(
            updated(state.update)
            + updated(state.average).times(1 / every)
            + Work(moved=casts, fused=casts, operators=2, kernels=2)
        ),
        parameters=state.parameters,
        trained=state.trained,
        buffers=state.buffers,
        kept=kept,
        forward_peak=max(0.0, max(running(forward), default=0.0) - kept),
        backward_peak=rehearsal.received[part] + peak - gradients,
        tensors=state.tensors,
    )


def cast_bytes(state: State, plan: RunPlan) -> float:
    """Of weights to the compute dtype and of gradients from it, once a step."""
    if plan.dtype.itemsize >= FLOAT:
        return 0.0
    return (state.parameters + state.trained) * (FLOAT + plan.dtype.itemsize)


def running(changes: Iterable[float]) -> Iterable[float]:
    """Sums so far."""
    total = 0.0
    for change in changes:
        total += change
        yield total


def highest(changes: Sequence[Change]) -> tuple[float, float]:
    """The highest sum, and the parameters' gradients in it."""
    total = gradients = 0.0
    most = (0.0, 0.0)
    for change in changes:
        total += change.bytes
        gradients += change.bytes * change.is_gradient
        most = max(most, (total, gradients))
    return most


def work_of(operators: Mapping[Key, Sequence[Operator]], part: str, which: str) -> Work:
    """The work of a pass."""
    own = operators[part, which]
    later = kept_between(operators, part, which)
    return summed(own, lambda: fused(own, later))


def updated(operators: Sequence[Operator]) -> Work:
    """The work of an update: everything that it changes is kept."""
    own = {access.storage for operator in operators for access in operator.writes}
    return summed(operators, lambda: fused(operators, own))


def summed(operators: Sequence[Operator], fuse: Callable[[], tuple[float, int]]) -> Work:
    """The sum over operators."""
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
    nbytes, kernels = fuse()
    return Work(
        products=products,
        attention=attention,
        messages=messages,
        moved=sum(map(moved, operators)),
        fused=nbytes,
        operators=len(operators),
        kernels=kernels,
    )
