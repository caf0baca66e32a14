"""Moments of a step at which a rank without a pipeline may hold the most, in bytes.

Follows FSDP2 unit by unit: what is all-gathered when, which buffers its collectives keep, and when
gradients are reduced; and on one rank the copies in the compute dtype (`parallel/compute_copies`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from titan_dit.parallel.compute_copies import CHUNK
from titan_dit.planner.work import Counts, Part


class Moment(NamedTuple):
    """Bytes beside the state and the inputs, by kind."""

    gathered: float = 0.0
    unreduced: float = 0.0
    gradients: float = 0.0
    activations: float = 0.0
    temporary: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How a rank keeps its parameters, and the gradients of several microbatches."""

    width: int
    """Bytes of an element in the compute format."""
    sum_width: int
    """Bytes of an element of weights, sums and reductions."""
    shards: int
    has_copies: bool
    """Replicas hold the same shards."""
    reshards: bool
    """Units free their parameters after forward."""
    reshards_root: bool
    """So do embed and head."""
    prefetch: int
    """Units gathered ahead on request; 0: FSDP2's implicit prefetch."""
    accumulates: bool
    """There are several microbatches."""
    in_float8: float = 0.0
    """Share of a block's parameters that are gathered in float8."""

    @property
    def is_alone(self) -> bool:
        """Nothing is sharded: parameters are only cast."""
        return self.shards == 1

    @property
    def block_width(self) -> float:
        """Bytes of a gathered element of a block."""
        return self.width - self.in_float8 * (self.width - 1)

    @property
    def fresh(self) -> float:
        """1 if a microbatch's gradients are tensors of their own, beside the sums."""
        return float(self.width < self.sum_width or not self.accumulates)

    @property
    def own_copy(self) -> float:
        """What an all-gather adds to its output: this rank's shards in the compute format."""
        return 1 / self.shards if self.width < self.sum_width else 0.0

    @property
    def reduced(self) -> float:
        """Bytes per element of a reduction's output; replicas without shards divide into a copy."""
        divided = 1 if self.is_alone and self.has_copies else 0
        return self.sum_width * (1 / self.shards + divided)


def sharded_moments(counts: Counts, units: tuple[int, ...], how: Sharding) -> Iterator[Moment]:
    """Forward and backward of a step's last microbatch under FSDP2."""
    yield from _forward(counts, units, how)
    yield from _backward(counts, units, how)


def _forward(counts: Counts, units: tuple[int, ...], how: Sharding) -> Iterator[Moment]:
    embed, block, head = counts.embed, counts.block, counts.head
    root = how.width * (embed.parameters + head.parameters)
    sums = _sums(counts, sum(units), how)
    # The output of an all-gather is kept until the next unit's has been copied from its own.
    buffer = 0.0 if how.is_alone else root
    gathered, kept = root, embed.kept
    yield Moment(gathered + buffer, sums, 0.0, kept + embed.forward_peak)
    for number, size in enumerate(units):
        own = how.block_width * block.parameters * size
        if not how.is_alone:
            yield Moment(gathered + buffer + own * (1 + how.own_copy), sums, 0.0, kept)
            buffer = own
        ahead = _ahead(counts, units[number + 1 : number + 1 + how.prefetch], how)
        kept += size * block.kept
        yield Moment(gathered + own + buffer + ahead, sums, 0.0, kept + block.forward_peak)
        gathered += 0.0 if how.reshards else own
    kept += head.kept
    yield Moment(gathered + buffer, sums, 0.0, kept + head.forward_peak)


def _backward(counts: Counts, units: tuple[int, ...], how: Sharding) -> Iterator[Moment]:
    embed, block, head = counts.embed, counts.block, counts.head
    width, wide = how.width, how.sum_width
    root, root_trained = embed.parameters + head.parameters, embed.trained + head.trained
    kept = embed.kept + sum(units) * block.kept
    whole = how.block_width * block.parameters * sum(units)
    resident = width * root + (0.0 if how.reshards else whole)
    gathers = how.reshards and not how.is_alone
    # Before the backward of a unit, the one before it in forward is gathered ahead.
    ahead = _ahead(counts, units[-1:], how) if gathers else 0.0
    again = width * root if how.reshards_root and not how.is_alone else 0.0
    sums, gradients = _sums(counts, sum(units), how), 0.0
    yield Moment(resident + again, sums, 0.0, kept + head.kept)
    fresh = how.fresh
    made = sums + fresh * head.backward_gradients
    yield Moment(resident + ahead, made, 0.0, kept + head.kept, head.backward_peak)
    # The gradient of tied weights waits for embed's share of it.
    of_head = how.fresh * width * (head.trained + counts.tied)
    reducing = 0.0
    """The input of the last reduce-scatter, kept until the next one."""
    for number in reversed(range(len(units))):
        size = units[number]
        own, trained = how.block_width * block.parameters * size, block.trained * size
        if how.reshards:
            if gathers:
                yield Moment(resident + ahead + own, sums + of_head + reducing, gradients, kept)
            resident += own
        before = units[max(0, number - max(1, how.prefetch)) : number]
        ahead = _ahead(counts, before, how) if gathers else 0.0
        for done in {0, size - 1}:
            made = of_head + reducing
            made += fresh * (width * block.trained * done + block.backward_gradients)
            held = kept - done * block.kept
            yield Moment(resident + ahead, sums + made, gradients, held, block.backward_peak)
        kept -= size * block.kept
        resident -= own
        made, summed = width * trained, wide * trained
        reducing = summed
        # The gradients are copied into the buffer that is reduced.
        yield Moment(
            resident + ahead,
            sums + of_head + reducing + (0.0 if how.accumulates else made),
            gradients,
            kept,
            counts.stream,
        )
        sums -= summed if how.accumulates else 0.0
        yield Moment(
            resident + ahead,
            sums + of_head + reducing,
            gradients + how.reduced * trained,
            kept,
            counts.stream,
        )
        gradients += wide * trained / how.shards
    made = sums + of_head + reducing + fresh * embed.backward_gradients
    yield Moment(resident, made, gradients, kept, embed.backward_peak)
    made = 0.0 if how.accumulates else width * root_trained
    yield Moment(0.0, sums + made + wide * root_trained, gradients)
    yield Moment(0.0, wide * root_trained, gradients + how.reduced * root_trained)


def _ahead(counts: Counts, units: tuple[int, ...], how: Sharding) -> float:
    """Outputs of all-gathers that no block uses yet."""
    if how.is_alone:
        return 0.0
    return how.block_width * counts.block.parameters * sum(units)


def _sums(counts: Counts, layers: int, how: Sharding) -> float:
    """Gradients of earlier microbatches, which are reduced with the last one's."""
    return how.sum_width * trained_of(counts, layers) if how.accumulates else 0.0


def trained_of(counts: Counts, layers: int) -> float:
    """Trained elements of embed, head and `layers` blocks."""
    return counts.embed.trained + counts.head.trained + layers * counts.block.trained


def single_moments(counts: Counts, layers: int, how: Sharding) -> Iterator[Moment]:
    """Forward and backward of the last microbatch on one rank, which has no FSDP."""
    embed, block, head = counts.embed, counts.block, counts.head
    is_cast = how.width < how.sum_width
    parameters = embed.parameters + head.parameters + layers * block.parameters
    trained = trained_of(counts, layers)
    gathered = how.width * parameters if is_cast else 0.0
    sums = how.sum_width * trained if how.accumulates else 0.0
    kept = embed.kept + layers * block.kept

    def at(made: float, activations: float, part: Part | None = None) -> Moment:
        """With the gradients of `made` elements of this microbatch, in the backward of `part`."""
        temporary = part.backward_peak if part else 0.0
        # In the weights' own format they are added to the sums one by one.
        own = how.fresh * (how.width * made + (part.backward_gradients if part else 0.0))
        if is_cast:
            return Moment(gathered, own, sums, activations, temporary)
        return Moment(gathered, 0.0, sums + own, activations, temporary)

    yield at(0.0, embed.kept + embed.forward_peak)
    yield at(0.0, kept + block.forward_peak)
    yield at(0.0, kept + head.kept + head.forward_peak)
    yield at(0.0, kept + head.kept, head)
    for done in {0, layers - 1}:
        made = head.trained + counts.tied + done * block.trained
        yield at(made, kept - done * block.kept, block)
    yield at(head.trained + counts.tied + layers * block.trained, embed.kept, embed)
    if is_cast:
        chunk = min(trained, CHUNK)
        if how.accumulates:
            yield Moment(0.0, how.width * trained, sums + how.sum_width * chunk)
        else:
            yield Moment(0.0, how.width * chunk, how.sum_width * trained)
