"""Lower bounds on a step's time that cost microseconds, from counts of coarser splits.

tp and cp split a block's work and add messages; [remat] adds work. So the counts of a coarser
split, divided by the ranks that share them, are at most those of a finer one. Only few splits have
to be rehearsed to rule out the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from titan_dit.plan import RunPlan
from titan_dit.planner import rates
from titan_dit.planner.candidates import Candidate
from titan_dit.planner.hardware import Device
from titan_dit.planner.links import Links
from titan_dit.planner.work import Counts, Part, Work
from titan_dit.schedules.placement import stages_per_rank
from titan_dit.schedules.schedule import schedule_of


class Bucket(NamedTuple):
    """What the work of a block on a microbatch depends on."""

    tp: int
    cp: int
    cp_method: str
    sequence_parallel: bool
    mode: str
    float8: str
    microbatch_size: int


class Busy(NamedTuple):
    """Seconds of a microbatch on a rank of a tp x cp group, at least."""

    forward: float
    """Of a block."""
    backward: float
    ends: float
    """Embed and head, both passes."""

    def plus(self, other: Busy, times: float = 1.0) -> Busy:
        """The sum."""
        return Busy(*(a + times * b for a, b in zip(self, other, strict=True)))

    def above(self, other: Busy) -> Busy:
        """What this takes more, nowhere below 0."""
        return Busy(*(max(0.0, a - b) for a, b in zip(self, other, strict=True)))


FP32 = 4
NONE = Busy(0.0, 0.0, 0.0)
SLICED = ("cp", "attention")
"""Terms that cp adds to, whatever tp is."""


def bucket_of(candidate: Candidate) -> Bucket:
    """The bucket of a candidate."""
    return Bucket(*(getattr(candidate, name) for name in Bucket._fields))


def coarser_than(candidate: Candidate) -> Iterator[Candidate]:
    """Splits whose work a candidate's can only add to, the cheapest to rehearse first.

    The last one is the candidate's own. Formats are the same: float8 halves the time of products.
    """
    ranks = candidate.dp_shard * candidate.tp * candidate.cp
    plain = candidate._replace(tp=1, cp=1, mode="none", dp_shard=ranks)
    yield plain
    if candidate.mode != "none":
        yield plain._replace(mode=candidate.mode)
    if candidate.tp > 1 and (candidate.cp > 1 or candidate.mode != "none"):
        yield candidate._replace(cp=1, mode="none", dp_shard=ranks // candidate.tp)
    if candidate.cp > 2 or (candidate.cp > 1 and (candidate.tp > 1 or candidate.mode != "none")):
        yield candidate._replace(tp=1, cp=2, mode="none", dp_shard=ranks // 2)
    if candidate.tp > 1 or candidate.cp > 1:
        yield candidate


Known = Sequence[tuple[Candidate, Counts]]
"""Coarser splits with their counts, as far as `coarser_than` was followed."""


def busy_of(known: Known, sample: Candidate, plan: RunPlan, device: Device) -> Busy:
    """What `sample` takes at least, by the coarser splits that are known; `plan`: of the sample.

    With tp it is the work of that tp. What [remat] and cp add without tp is added to it.
    """
    links = Links(plan.sizes, device)
    fused = plan.compile.enabled

    def took(one: tuple[Candidate, Counts], terms: Sequence[str] = ()) -> Busy:
        coarse, counts = one
        share = coarse.tp * coarse.cp / (sample.tp * sample.cp)

        def seconds(*works: Work) -> float:
            found = (rates.seconds(work, device, links, fused=fused) for work in works)
            # The host may run ahead of one part and fall behind in another.
            return share * sum(
                value
                for each in found
                for term, value in each.items()
                if (term in terms if terms else term != "launches")
            )

        ends = counts.embed, counts.head
        return Busy(
            seconds(counts.block.forward),
            seconds(counts.block.backward),
            seconds(*(work for end in ends for work in (end.forward, end.backward))),
        )

    if bucket_of(known[-1][0]) == bucket_of(sample):
        return took(known[-1])
    plain = took(known[0])
    base, more = plain, NONE
    for one in known[1:]:
        split = one[0].tp, one[0].cp
        if split == (1, 1):
            more = more.plus(took(one).above(plain))
        elif split == (sample.tp, 1):
            base = took(one)
        else:
            more = more.plus(took(one, SLICED).above(took(known[0], SLICED)))
    return base.plus(more)


def floor_of(busy: Busy, candidate: Candidate, layers: int, batch: int) -> float:
    """Seconds of a step at least: the mean over ranks, and the chain through the last rank."""
    count = batch / (candidate.dp_replicate * candidate.dp_shard * candidate.microbatch_size)
    block, pp = busy.forward + busy.backward, candidate.pp
    mean = count * (layers * block + busy.ends) / pp
    if pp == 1:
        return mean
    stages = stages_per_rank(candidate.schedule, candidate.virtual_stages)
    least = layers // (pp * stages)
    # A microbatch comes to the last rank through all others, and has to go back.
    schedule = schedule_of(candidate.schedule)
    filled = busy.forward if schedule.splits_backward else block
    others = 0 if schedule.v_shaped else pp - 1
    return max(mean, count * stages * least * block + others * least * filled)


def least_bytes(counts: Counts, coarse: Candidate, fine: Candidate, model: RunPlan) -> float:
    """Bytes that the first pipeline rank holds at least: its weights, and what forward keeps.

    From the counts of a coarser split with the same [remat]. In a pipeline FSDP keeps the gathered
    weights, and all schedules but V-shaped ones begin with a forward for each rank.
    """
    layers = model.spec.num_layers // fine.pp
    elements = layers * counts.block.parameters * coarse.tp / fine.tp
    held = FP32 * elements / (fine.dp_shard * fine.cp)
    flights = 1.0
    if fine.pp > 1:
        shared = fine.dp_shard * fine.cp > 1
        held += model.dtype.itemsize * elements if shared and fine.float8 == "off" else 0.0
        data = fine.dp_replicate * fine.dp_shard
        count = model.global_batch_size / (data * fine.microbatch_size)
        v_shaped = schedule_of(fine.schedule).v_shaped
        flights = 1.0 if v_shaped else min(fine.pp, count)
        if shared and count > fine.pp and not v_shaped:
            # After its first backward the rank has the gradients of all its weights, unreduced.
            held += model.dtype.itemsize * elements
    share = coarse.tp * coarse.cp / (fine.tp * fine.cp)
    return held + flights * layers * counts.block.kept * share


def scaled(counts: Counts, coarse: Candidate, fine: Candidate) -> Counts:
    """Counts of a coarser split as a lower bound on those of a finer one, memory included."""
    share = coarse.tp * coarse.cp / (fine.tp * fine.cp)
    tensors = coarse.tp / fine.tp

    def part(own: Part) -> Part:
        return replace(
            own,
            forward=own.forward.times(share),
            backward=own.backward.times(share),
            update=own.update.times(tensors),
            parameters=own.parameters * tensors,
            trained=own.trained * tensors,
            kept=own.kept * share,
            forward_peak=own.forward_peak * share,
            backward_peak=min(own.backward_peak, own.backward_peak * share),
            backward_gradients=own.backward_gradients * tensors,
        )

    return replace(
        counts,
        embed=part(counts.embed),
        block=part(counts.block),
        head=part(counts.head),
        prepare=counts.prepare.times(share),
        inputs=counts.inputs * share,
        stream=counts.stream * share,
        tied=counts.tied * tensors,
    )
