"""Moments of a step at which a pipeline rank may hold the most, in bytes.

A rank keeps its parameters gathered, sums the gradients of its microbatches unreduced, and holds
the activations of the microbatches that its order has in flight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from titan_dit.execution.planned import AHEAD
from titan_dit.planner.held import Moment, Sharding
from titan_dit.planner.work import Counts, Part
from titan_dit.schedules.action import Action, Kind, Order
from titan_dit.schedules.messages import inputs_of, output_of, reader_of
from titan_dit.schedules.placement import pipeline_order

BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "float8": 2}
"""Of a gradient in the format of its product; in float8 it is kept in bf16."""


class InFlight(NamedTuple):
    """What a rank holds during an action; one number for each of its stages."""

    kind: Kind
    place: int
    """The action's stage among those of the rank."""
    held: tuple[int, ...]
    """Microbatches with activations: of a forward before it, else with the action's own."""
    halves: tuple[int, ...]
    """Those of them whose input gradients are done."""
    summed: tuple[bool, ...]
    """Whether the stage has gradients of an earlier microbatch."""
    last: bool
    """Whether the stage's gradients are reduced after it."""
    messages: int
    """Streams that are received for the next actions, or that are held because they were sent last.

    An output that was sent is not one of them: its microbatch keeps it."""


@lru_cache(maxsize=4096)
def profile_of_schedule(
    schedule: str, pp: int, microbatches: int, virtual_stages: int
) -> tuple[tuple[InFlight, ...], ...]:
    """`profile` of a schedule's own order."""
    return profile(
        pipeline_order(
            schedule,
            num_ranks=pp,
            num_microbatches=microbatches,
            virtual_stages=virtual_stages,
        )
    )


@lru_cache(maxsize=4096)
def exceeded(schedule: str, pp: int, microbatches: int, virtual_stages: int) -> tuple[bool, ...]:
    """By rank: whether the rank before it never has less in flight."""
    flights = profile_of_schedule(schedule, pp, microbatches, virtual_stages)
    return tuple(
        rank > 0 and all(any(_is_above(other, own) for other in flights[rank - 1]) for own in each)
        for rank, each in enumerate(flights)
    )


def _is_above(first: InFlight, second: InFlight) -> bool:
    alike = first.kind is second.kind and first.place == second.place and first.last == second.last
    return alike and _covers(first, second)


def profile(order: Order) -> tuple[tuple[InFlight, ...], ...]:
    """The moments of each rank that no other one exceeds in every number."""
    rank_of = {action.stage: rank for rank, actions in enumerate(order) for action in actions}
    return tuple(_highest(_moments(actions, rank_of, rank)) for rank, actions in enumerate(order))


def _moments(actions: Sequence[Action], rank_of: dict[int, int], rank: int) -> Iterator[InFlight]:
    stages = sorted({action.stage for action in actions})
    place_of = {stage: place for place, stage in enumerate(stages)}
    held, halves = [0] * len(stages), [0] * len(stages)
    summed = [False] * len(stages)
    left = [sum(a.kind is Kind.FORWARD and a.stage == stage for a in actions) for stage in stages]
    arrives = [
        any(rank_of[message.stage] != rank for message in inputs_of(action, len(rank_of)))
        for action in actions
    ]
    sent = False
    """Whether the last message that the rank sent was a gradient."""
    for number, action in enumerate(actions):
        place, kind = place_of[action.stage], action.kind
        ends = kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
        left[place] -= ends
        ahead = sum(arrives[number + 1 : number + 1 + AHEAD])
        now = tuple(held), tuple(halves), tuple(summed)
        yield InFlight(kind, place, *now, ends and not left[place], ahead + sent)
        if rank_of.get(reader_of(output_of(action)), rank) != rank:
            sent = kind is not Kind.FORWARD
        if kind is Kind.FORWARD:
            held[place] += 1
        elif kind is Kind.BACKWARD_INPUT:
            halves[place] += 1
        else:
            held[place] -= 1
            halves[place] -= kind is Kind.BACKWARD_WEIGHT
            summed[place] = True


def _highest(moments: Iterator[InFlight]) -> tuple[InFlight, ...]:
    """Without those that another one of the same action exceeds or equals in every number."""
    groups: dict[tuple[Kind, int, bool], list[InFlight]] = {}
    every = sorted(set(moments), key=_size, reverse=True)
    for moment in every:
        kept = groups.setdefault((moment.kind, moment.place, moment.last), [])
        if not any(_covers(other, moment) for other in kept):
            kept.append(moment)
    return tuple(moment for kept in groups.values() for moment in kept)


def _numbers(moment: InFlight) -> tuple[int, ...]:
    return (*moment.held, *moment.halves, *moment.summed, moment.messages)


def _size(moment: InFlight) -> int:
    return sum(_numbers(moment))


def _covers(first: InFlight, second: InFlight) -> bool:
    return all(a >= b for a, b in zip(_numbers(first), _numbers(second), strict=True))


@dataclass(frozen=True, kw_only=True)
class StageParts:
    """A stage of this rank."""

    counts: Counts
    layers: int
    has_embed: bool
    has_head: bool
    has_copy: bool
    """It computes with a copy of the first stage's weights."""
    units: tuple[int, ...]
    """Blocks of its FSDP units."""
    whole_table: float = 0.0
    """See `whole_table`."""

    @cached_property
    def parameters(self) -> float:
        """Elements on a tp rank, with the copy."""
        return self._elements("parameters")

    @cached_property
    def trained(self) -> float:
        """Those with gradients."""
        return self._elements("trained")

    @property
    def largest_unit(self) -> int:
        """Blocks of its largest FSDP unit."""
        return max(self.units)

    @property
    def copied(self) -> float:
        """Elements of the copy."""
        return self.counts.tied * self.has_copy

    @cached_property
    def unreduced(self) -> float:
        """Elements of the gradients before they are reduced."""
        return self.trained + self.has_embed * self.whole_table

    @property
    def root(self) -> float:
        """Those outside the blocks."""
        return self.unreduced - self.layers * self.counts.block.trained

    def _elements(self, key: str) -> float:
        counts = self.counts
        found = self.layers * getattr(counts.block, key)
        found += getattr(counts.embed, key) * self.has_embed
        found += getattr(counts.head, key) * self.has_head
        return float(found + counts.tied * self.has_copy)

    @cached_property
    def entered(self) -> float:
        """Bytes that a microbatch keeps before the first block."""
        return self.counts.embed.kept if self.has_embed else self.counts.stream

    @cached_property
    def kept(self) -> float:
        """Bytes that a microbatch keeps until its backward."""
        counts = self.counts
        return self.entered + self.layers * counts.block.kept + counts.head.kept * self.has_head

    @cached_property
    def forward_high(self) -> float:
        """The most that a forward holds of its own microbatch."""
        counts, found = self.counts, 0.0
        if self.has_embed:
            found = self.entered + counts.embed.forward_peak
        blocks = self.entered + self.layers * counts.block.kept
        found = max(found, blocks + counts.block.forward_peak)
        return max(found, self.kept + counts.head.forward_peak) if self.has_head else found

    @cached_property
    def half(self) -> float:
        """Bytes that a microbatch keeps more between its input and its weight gradients."""
        counts = self.counts
        if self.has_embed:  # The first stage computes no input gradients: all waits.
            return counts.stream
        # The head's: a loss over a vocabulary writes them over its logits; others are small.
        return self.layers * of_products(counts.block)

    def backward(self, how: Sharding, is_summed: bool) -> Iterator[Moment]:
        """Moments of a full backward; activations are less what its microbatch keeps."""
        counts, gone, made = self.counts, 0.0, 0.0
        is_cast = how.width < how.sum_width
        # In the weights' own format gradients are added to the sums one by one.
        width = float(how.width if is_cast or not is_summed else 0)
        fresh = float(width > 0)
        sums = 0.0 if is_summed else float(how.sum_width)
        if self.has_head:
            own = fresh * counts.head.backward_gradients
            yield Moment(0.0, own, 0.0, 0.0, counts.head.backward_peak)
            gone = counts.head.kept
            made = width * (counts.head.trained + counts.tied * self.has_copy)
        # Its output is held to the end; a block's gradients are counted in place of its output.
        output, ended = 0.0 if self.has_head else counts.stream, 0
        for size in reversed(self.units):
            for own in {0, size - 1}:
                done = ended + own
                found = made + own * width * counts.block.trained
                found += fresh * counts.block.backward_gradients
                found += ended * sums * counts.block.trained
                activations = -gone - done * counts.block.kept + (output if done else 0.0)
                yield Moment(0.0, found, 0.0, activations, counts.block.backward_peak)
            ended += size
        blocks = self.layers * sums * counts.block.trained
        if self.has_embed:
            found = made + blocks + fresh * counts.embed.backward_gradients
            # Alone on its stage, it adds no part of a table to the head's.
            high = counts.embed.backward_peak
            high -= how.width * counts.tied if self.whole_table else 0.0
            yield Moment(0.0, found, 0.0, self.entered - self.kept + output, high)
        # Those outside the blocks are summed at the end.
        own = (width + sums * is_cast) * self.root
        yield Moment(0.0, blocks + own, 0.0, output - self.kept)


def whole_table(counts: Counts, tp: int, width: int) -> float:
    """Elements by which the gradient of embed exceeds its parameters on a tp rank.

    A table whose rows are split over tp has a gradient with all rows until it is reduced, unless
    the head adds its own to it.
    """
    embed = counts.embed
    if not counts.tied:
        return max(0.0, embed.backward_gradients / width - embed.trained)
    is_whole = embed.backward_peak >= tp * width * counts.tied
    return (tp - 1) * counts.tied if is_whole else 0.0


def of_products(part: Part) -> float:
    """Bytes of the gradients from which a part computes those of its weights."""
    return sum(
        count * product.batch * product.m * product.k * BYTES[product.dtype]
        for product, count in part.backward.products.items()
        if product.is_weight_gradient
    )


def pipeline_moments(
    flights: Sequence[InFlight],
    stages: Sequence[StageParts],
    how: Sharding,
    growth: float,
    sending: float,
) -> Iterator[Moment]:
    """Forward and backward of a step.

    `growth`: times the activations of the planned order. `sending`: bytes of a message to which no
    action belongs.
    """
    in_float8 = (how.width - how.block_width) * sum(
        stage.layers * stage.counts.block.parameters for stage in stages
    )
    gathered = how.width * sum(stage.parameters for stage in stages) - in_float8
    stream = stages[0].counts.stream
    for flight in flights:
        summed = sum(
            stage.unreduced
            for stage, is_summed in zip(stages, flight.summed, strict=True)
            if is_summed
        )
        held = sum(count * each.kept for count, each in zip(flight.held, stages, strict=True))
        halves = sum(count * each.half for count, each in zip(flight.halves, stages, strict=True))
        for own in _own(flight, stages[flight.place], how):
            activations = held + flight.messages * stream + own.activations
            yield Moment(
                gathered + own.gathered,
                how.sum_width * summed + own.unreduced,
                own.gradients,
                activations * growth + sending,
                halves + own.temporary,
            )


def _own(flight: InFlight, stage: StageParts, how: Sharding) -> Iterator[Moment]:
    """What an action adds to all that the rank holds."""
    is_summed, counts = flight.summed[flight.place], stage.counts
    if flight.kind is Kind.FORWARD:
        yield Moment(activations=stage.forward_high)
        return
    arrived = 0.0 if stage.has_head else counts.stream
    """The gradient of the stage's output."""
    whole = how.width * stage.unreduced
    if flight.kind is Kind.BACKWARD:
        moments = stage.backward(how, is_summed)
        yield from (each._replace(activations=each.activations + arrived) for each in moments)
    elif flight.kind is Kind.BACKWARD_INPUT and not stage.has_embed:
        # The graph is kept for the second half: nothing is freed.
        if stage.has_head:
            yield Moment(temporary=counts.head.backward_peak)
        yield Moment(activations=arrived, temporary=stage.half + counts.block.backward_peak)
    elif flight.kind is Kind.BACKWARD_WEIGHT and stage.has_embed:
        yield from stage.backward(how, is_summed)
    elif flight.kind is Kind.BACKWARD_WEIGHT:
        yield Moment(unreduced=whole)
    if flight.last:
        sums = 0.0 if is_summed else how.sum_width * stage.unreduced
        blocks = stage.largest_unit * counts.block.trained
        gone = stage.kept + (stage.half if flight.kind is Kind.BACKWARD_WEIGHT else 0.0)
        # Each unit frees its parameters, then copies its gradients to reduce them.
        for unit, width in ((stage.root, how.width), (blocks, how.block_width)):
            yield Moment(-width * unit, sums + how.sum_width * unit, 0.0, -gone)
