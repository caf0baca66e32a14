"""The order of steps over buckets: a pure function of the seed and one integer, the cursor.

A bucket holds the rows of one shape, and every step takes the rows of one bucket. Bucket b has N
training rows and gives B samples to each of its steps. Round r, about an epoch, has

    floor((r + 1) N / B) - floor(r N / B)

steps of it, and a keyed permutation orders the steps of all buckets in the round. A bucket's
samples are an endless stream: its rows, permuted anew in each pass, taken in order. So nothing is
dropped: after any number of rounds fewer than B samples of a bucket wait, and they come first in
the next round. A bucket of fewer than B rows repeats them within a step. N and B do not depend on
the ranks, so neither do the samples of a step.

The rows of a bucket may be of several datasets: N is then what they give to a pass together, and
their stream that of `mixed_order`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np

from titan_dit.config.section import UserError
from titan_dit.data.base import SampleOrder
from titan_dit.data.mixed_order import MixedOrder, Part
from titan_dit.data.order import (
    BatchPlan,
    EpochOrder,
    LaterOrder,
    LaterPlan,
    Numbers,
    SampleRange,
    Step,
    StepPlan,
    derived_seed,
    permuted,
)

BLOCK = 4096
"""Steps whose buckets are computed at once. A round keeps where each block begins, no more."""


@dataclass(frozen=True)
class Bucket:
    """The training rows of one shape, and how many of them a step takes."""

    name: str
    """Name for messages, such as "832x1216"."""
    first: int
    """Its first row in the dataset; the others follow."""
    num_rows: int
    """Rows, including those held out for validation."""
    batch_size: int
    """Samples of a step: B."""
    held_out: tuple[int, ...] = ()
    """Its rows held out of training, ascending, counted from `first`."""
    parts: tuple[Part, ...] = ()
    """Its rows by dataset; () if all are of one."""

    @property
    def num_training_rows(self) -> int:
        """Rows to train on."""
        return self.num_rows - len(self.held_out)

    @property
    def samples(self) -> int | Fraction:
        """Samples of a pass over the rows: N. A fraction is a mean, of datasets with weights."""
        if not self.parts:
            return self.num_training_rows
        return sum(part.rate for part in self.parts)

    def steps_before(self, round_number: int) -> int:
        """Steps of this bucket before a round."""
        return round_number * self.samples // self.batch_size

    def stream(self, seed: int) -> EpochOrder | MixedOrder:
        """The endless stream of its rows, counted from `first`."""
        if self.parts:
            return MixedOrder(seed, self.parts)
        return EpochOrder(seed, self.num_training_rows, self.held_out)


def split_held_out(
    held_out: Sequence[int], firsts: Sequence[int], sizes: Sequence[int]
) -> list[tuple[int, ...]]:
    """The held-out rows of each bucket, counted from its first row."""
    rows = np.array(sorted(held_out), dtype=np.int64)
    return [
        tuple((rows[(rows >= first) & (rows < first + size)] - first).tolist())
        for first, size in zip(firsts, sizes, strict=True)
    ]


@dataclass(frozen=True)
class BucketOrder:
    """Cursor -> step, and sample number -> dataset row. A `SampleOrder`."""

    seed: int
    buckets: tuple[Bucket, ...]

    @classmethod
    def of(
        cls,
        seed: int,
        names: Sequence[str],
        sizes: Sequence[int],
        batch_sizes: Sequence[int],
        held_out: Sequence[int] = (),
    ) -> BucketOrder:
        """The order of buckets of `sizes` rows, which follow each other in the dataset.

        Raises UserError for a bucket whose rows are all held out.
        """
        firsts = (np.cumsum(sizes) - np.array(sizes)).tolist()
        out = split_held_out(held_out, firsts, sizes)
        buckets = tuple(map(Bucket, names, firsts, sizes, batch_sizes, out))
        for bucket in buckets:
            if not bucket.num_training_rows:
                raise UserError(
                    f"[validation] samples={len(held_out)} holds out all {bucket.num_rows} rows of "
                    f"the bucket {bucket.name}, so none remain for training. Set fewer."
                )
        return cls(seed, buckets)

    @classmethod
    def mixed(
        cls,
        seed: int,
        names: Sequence[str],
        parts: Sequence[tuple[Part, ...]],
        batch_sizes: Sequence[int],
    ) -> BucketOrder:
        """The order of buckets that follow each other, given the datasets in each."""
        buckets, first = list[Bucket](), 0
        for name, own, batch_size in zip(names, parts, batch_sizes, strict=True):
            held_out = tuple(part.first + row for part in own for row in part.held_out)
            num_rows = sum(part.num_rows for part in own)
            buckets.append(Bucket(name, first, num_rows, batch_size, held_out, own))
            first += num_rows
        return cls(seed, tuple(buckets))

    @cached_property
    def samples(self) -> int | Fraction:
        """Samples of a round, of all buckets, in the mean."""
        return sum(bucket.samples for bucket in self.buckets)

    @property
    def num_rows(self) -> int:
        """Samples of an epoch. Whole with weights, too: they change the shares, not the total."""
        return int(self.samples)

    def samples_before(self, round_number: int) -> int:
        """The cursor of the first step of a round."""
        return sum(b.steps_before(round_number) * b.batch_size for b in self.buckets)

    def steps_before(self, round_number: int) -> int:
        """Steps of all buckets before a round."""
        return sum(bucket.steps_before(round_number) for bucket in self.buckets)

    def waiting_before(self, round_number: int) -> list[int]:
        """Samples of each bucket that wait when a round begins; fewer than its `batch_size`."""
        return [
            round_number * b.samples // 1 - b.steps_before(round_number) * b.batch_size
            for b in self.buckets
        ]

    def round_of(self, cursor: int) -> int:
        """The round that holds sample number `cursor`.

        Round r begins at most sum(B) samples before r * sum(N), which bounds the search.
        """
        least = cursor // self.samples
        most = (cursor + sum(b.batch_size for b in self.buckets)) // self.samples + 1
        return least - 1 + bisect_right(range(least, most + 1), cursor, key=self.samples_before)

    def step(self, cursor: int) -> Step:
        """The step that begins at `cursor`. Raises UserError if none does."""
        first, bucket, _ = self.located(cursor)
        if first != cursor:
            raise UserError(
                f"[training] the run goes on at sample {cursor}, which is inside a step of "
                f"{self.buckets[bucket].batch_size} samples of {self.buckets[bucket].name}. Set "
                "the sizes of its steps as they were: global_batch_size, or tokens_per_step and "
                "batch_multiple."
            )
        end = cursor + self.buckets[bucket].batch_size
        return Step(range(cursor, end), end, bucket)

    def located(self, number: int) -> tuple[int, int, int]:
        """(first sample number of a sample's step, its bucket, the step's number in the bucket)."""
        number_of_round = self.round_of(number)
        found = self.round_steps(number_of_round)
        before = self.samples_before(number_of_round)
        first, bucket, step = found.at(number - before)
        return before + first, bucket, step

    def rows(self, sample_numbers: Sequence[int]) -> list[int]:
        """Map sample numbers, in any order, to dataset rows.

        Step k of a bucket takes the places k B to (k + 1) B - 1 of its stream.
        """
        numbers = np.fromiter(sample_numbers, np.int64, len(sample_numbers))
        rows = np.full(len(numbers), -1)
        while len(left := np.flatnonzero(rows < 0)):  # Once for each step that has samples here.
            first, number, step = self.located(int(numbers[left[0]]))
            bucket = self.buckets[number]
            inside = left[(numbers[left] >= first) & (numbers[left] < first + bucket.batch_size)]
            places = numbers[inside] - first + step * bucket.batch_size
            found = self.streams[number].rows(places.tolist())
            rows[inside] = np.array(found) + bucket.first
        found_rows: list[int] = rows.tolist()
        return found_rows

    @cached_property
    def streams(self) -> tuple[EpochOrder | MixedOrder, ...]:
        """The endless stream of each bucket's rows, a permutation in each pass over them."""
        return tuple(
            bucket.stream(derived_seed(self.seed, f"bucket {number}"))
            for number, bucket in enumerate(self.buckets)
        )

    @cached_property
    def held_rounds(self) -> dict[int, RoundSteps]:
        """The last two rounds that were asked for: a rank may read ahead into the next one."""
        return {}

    def round_steps(self, number: int) -> RoundSteps:
        """The steps of a round."""
        held = self.held_rounds
        if number not in held:
            while len(held) > 1:
                del held[next(iter(held))]
            held[number] = RoundSteps(self, number)
        return held[number]


@dataclass(frozen=True)
class BucketPlan:
    """Steps of one bucket each: a `StepPlan`.

    The `skipped` ranges are ascending, disjoint and of whole steps.
    """

    order: BucketOrder
    skipped: tuple[SampleRange, ...] = ()

    def __call__(self, cursor: int) -> Step:
        """See `StepPlan`. Raises UserError for a cursor inside a step."""
        for first, end in self.skipped:
            if first <= cursor < end:
                cursor = end
        return self.order.step(cursor)


def rows_and_sizes(order: SampleOrder, global_batch_size: int) -> list[tuple[int | Fraction, int]]:
    """(samples of an epoch, samples of a step) of each bucket.

    `global_batch_size`: see `step_plan`.
    """
    if isinstance(order, BucketOrder):
        return [(bucket.samples, bucket.batch_size) for bucket in order.buckets]
    return [(order.num_rows, global_batch_size)]


def step_plan(
    order: SampleOrder, global_batch_size: int, skipped: tuple[SampleRange, ...] = ()
) -> StepPlan:
    """The steps of a run; `global_batch_size`: of data without buckets."""
    if isinstance(order, LaterOrder):
        own = step_plan(order.order, global_batch_size, order.skipped(skipped))
        return LaterPlan(own, order.first)
    if isinstance(order, BucketOrder):
        return BucketPlan(order, skipped)
    return BatchPlan(global_batch_size, skipped)


class RoundSteps:
    """The steps of a round in their order, computed block by block."""

    def __init__(self, order: BucketOrder, number: int) -> None:
        self.before: Numbers = np.array([bucket.steps_before(number) for bucket in order.buckets])
        """Steps of each bucket before the round."""
        after: Numbers = np.array([bucket.steps_before(number + 1) for bucket in order.buckets])
        self.seed, self.number = derived_seed(order.seed, "steps of buckets"), number
        self.ends = (after - self.before).cumsum()
        self.sizes: Numbers = np.array([bucket.batch_size for bucket in order.buckets])
        self.num_steps = int(self.ends[-1])
        counts = [np.zeros_like(self.before)]
        for first in range(0, self.num_steps, BLOCK):
            counts.append(np.bincount(self.drawn(first), minlength=len(self.before)))
        self.done: Numbers = np.cumsum(counts, axis=0)
        """Steps of each bucket before each block of steps, [blocks + 1, buckets]."""
        self.starts: Numbers = self.done @ self.sizes
        """Samples of the round before each block of steps."""
        self.held: tuple[int, Numbers, Numbers, Numbers] | None = None
        """(block, buckets of its steps, their numbers in the buckets, their first samples)."""

    def drawn(self, first: int) -> Numbers:
        """The bucket of each step of the block that begins with step `first`."""
        places = np.arange(first, min(first + BLOCK, self.num_steps))
        drawn = permuted(self.seed, self.number, self.num_steps, places)
        return np.searchsorted(self.ends, drawn, side="right")

    def at(self, sample: int) -> tuple[int, int, int]:
        """(first sample of the step that holds a sample, its bucket, its number in the bucket).

        Samples are counted from the round's first, steps of a bucket from the run's.
        """
        block = int(np.searchsorted(self.starts, sample, side="right")) - 1
        if self.held is None or self.held[0] != block:
            buckets = self.drawn(block * BLOCK)
            sizes = self.sizes[buckets]
            # In their order, so that a bucket's stream goes on without gaps.
            numbers = (self.before + self.done[block])[buckets] + places_among_equals(buckets)
            self.held = block, buckets, numbers, self.starts[block] + sizes.cumsum() - sizes
        _, buckets, numbers, firsts = self.held
        place = int(np.searchsorted(firsts, sample, side="right")) - 1
        return int(firsts[place]), int(buckets[place]), int(numbers[place])


def places_among_equals(values: Numbers) -> Numbers:
    """For each value: how many equal ones stand before it."""
    by_value = np.argsort(values, kind="stable")
    places = np.empty_like(values)
    ordered = values[by_value]
    places[by_value] = np.arange(len(values)) - np.searchsorted(ordered, ordered)
    return places
