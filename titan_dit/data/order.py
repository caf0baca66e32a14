"""The order of samples: a pure function of the seed and one integer, the cursor.

An epoch is a keyed permutation of the rows, computed row by row. A blend mixes datasets by weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from titan_dit.config import schema
from titan_dit.config.section import UserError, show
from titan_dit.data.base import SampleOrder, Source
from titan_dit.rng import GOLDEN, SPLITMIX, permutation, stream_key, words

MIN_SIZE, MAX_SIZE = 1 << 16, 1 << 62
"""Minimum and maximum size of a `Permutation`."""
ROUNDS = 8
"""Rounds of the permutation, as in FF3 (NIST SP 800-38G). The tests see structure with 2."""
GAMMA = np.uint64(GOLDEN)
MIX = [(np.uint64(shift), np.uint64(multiplier)) for shift, multiplier in SPLITMIX]
LAST_SHIFT, ONE = np.uint64(31), np.uint64(1)

Words = NDArray[np.uint64]


def mix(key: np.uint64 | Words, numbers: Words) -> Words:
    """Return the outputs `numbers` of SplitMix64 seeded with `key`."""
    z = numbers * GAMMA
    z += key
    for shift, multiplier in MIX:
        z ^= z >> shift
        z *= multiplier
    z ^= z >> LAST_SHIFT
    return z


@dataclass(frozen=True)
class Permutation:
    """A permutation of range(size), by one key per round."""

    size: int
    keys: Sequence[np.uint64 | Words]
    """One key per round, an even number of them. Arrays [n, 1] give n permutations at once."""

    @classmethod
    def of(cls, seed: int, stream: str, number: int, size: int) -> Permutation:
        """Return permutation `number` of a stream; each is independent of all others."""
        return cls(size, round_keys(seed, stream, number, ROUNDS))

    @property
    def halves(self) -> tuple[int, int]:
        """(a, b), both near sqrt(size), with a * b >= size."""
        a = math.isqrt(self.size - 1) + 1
        return a, -(-self.size // a)

    def __call__(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Map places in range(size) to elements, in the memory of a few arrays like `places`."""
        assert MIN_SIZE <= self.size <= MAX_SIZE
        found = self.permuted(places.astype(np.uint64))
        outside = np.flatnonzero(found >= self.size)
        while len(outside):
            found[outside] = self.permuted(found[outside])
            outside = outside[found[outside] >= self.size]
        return found.astype(np.int64)

    def permuted(self, numbers: Words) -> Words:
        """Permute range(a * b)."""
        a, b = map(np.uint64, self.halves)
        right = numbers // a
        left = numbers - right * a
        for first, second in zip(self.keys[::2], self.keys[1::2], strict=True):
            # 63 bits: a sum that wrapped at 2^64 would not be one-to-one.
            left = (left + (mix(first, right) >> ONE)) % a
            right = (right + (mix(second, left) >> ONE)) % b
        return right * a + left


@lru_cache(maxsize=256)  # A bucket or a dataset of a blend has its own.
def round_keys(seed: int, stream: str, number: int, rounds: int) -> tuple[np.uint64, ...]:
    """Return the 64-bit keys of the rounds, drawn by Philox."""
    drawn = words(seed, stream, torch.tensor([number]), 2 * rounds)[0].numpy().astype(np.uint64)
    return tuple(drawn[::2] << np.uint64(32) | drawn[1::2])


SampleRange: TypeAlias = tuple[int, int]
MAX_STEP_NUMBERS = 1 << 26
"""Maximum numbers of a step in a file."""


def wrong_ranges(ranges: Sequence[Sequence[int]]) -> str | None:
    """The error of a step's ranges in a file; None if they are valid."""
    if any(first > end for first, end in ranges):
        return "has a range that ends before it begins"
    total = sum(end - first for first, end in ranges)
    return f"has {total:,} numbers, too many for a step" if total > MAX_STEP_NUMBERS else None


STEP_RANGES = schema.Ruled(schema.Rows((schema.COUNT, schema.COUNT)), wrong_ranges)
"""Schema of the ranges of a step."""


def ranges_of(numbers: Iterable[int]) -> list[SampleRange]:
    """Compress ascending numbers: 3 4 5 8 -> (3, 6) (8, 9)."""
    found: list[SampleRange] = []
    for number in numbers:
        if found and found[-1][1] == number:
            found[-1] = (found[-1][0], number + 1)
        else:
            found.append((number, number + 1))
    return found


def numbers_of(ranges: Iterable[Sequence[int]]) -> Iterator[int]:
    """Yield the numbers of the ranges, in order."""
    for first, end in ranges:
        yield from range(first, end)


def merged(ranges: Iterable[SampleRange]) -> tuple[SampleRange, ...]:
    """Return the union as ascending, non-empty, non-adjacent ranges."""
    result: list[SampleRange] = []
    for first, end in sorted(one for one in ranges if one[0] < one[1]):
        if result and first <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((first, end))
    return tuple(result)


def count(ranges: Iterable[SampleRange], below: int | None = None) -> int:
    """Count the numbers in disjoint ranges; with `below`, only the smaller ones."""
    ends = ((first, end if below is None else min(end, below)) for first, end in ranges)
    return sum(max(0, end - first) for first, end in ends)


Numbers: TypeAlias = NDArray[np.int64]


class Step(NamedTuple):
    """The samples of one optimizer step, on all ranks."""

    numbers: Sequence[int]
    """Sample numbers, ascending."""
    next_cursor: int
    bucket: int = 0
    """Number of the bucket of its samples, which have one shape; 0 if all data has."""


@runtime_checkable
class StepPlan(Protocol):
    """Cursor -> step: `BatchPlan`, or `buckets.BucketPlan` for data of several shapes."""

    def __call__(self, cursor: int) -> Step:
        """Return the step that begins at `cursor`, or after the skipped range that it is in."""


def steps_from(plan: StepPlan, cursor: int) -> Iterator[Step]:
    """Yield all steps from `cursor` on, endlessly."""
    while True:
        step = plan(cursor)
        yield step
        cursor = step.next_cursor


@dataclass(frozen=True)
class BatchPlan:
    """Steps of equal size: a `StepPlan`.

    No batch contains the `skipped` ranges, which are ascending and disjoint.
    """

    global_batch_size: int
    skipped: tuple[SampleRange, ...] = ()

    def __call__(self, cursor: int) -> Step:
        """See `StepPlan`; a batch continues after a skipped range."""
        parts, wanted = [], self.global_batch_size
        for first, end in self.skipped:
            if end <= cursor:
                continue
            if first >= cursor + wanted:
                break
            if first > cursor:
                parts.append(range(cursor, first))
                wanted -= first - cursor
            cursor = end
        parts.append(range(cursor, cursor + wanted))
        numbers = parts[0] if len(parts) == 1 else list(chain(*parts))
        return Step(numbers, cursor + wanted)


@dataclass(frozen=True)
class EpochOrder:
    """Sample number -> dataset row; every epoch is a new permutation of the training rows."""

    seed: int
    num_rows: int
    """Number of training rows."""
    held_out: tuple[int, ...] = ()
    """Rows held out of training, ascending."""
    data_order: str = "feistel"
    """[job] data_order: "feistel", or "sort" for older runs. They are equal for few rows."""

    @classmethod
    def of(cls, seed: int, num_rows: int, held_out: tuple[int, ...], data_order: str) -> EpochOrder:
        """Return the order of a dataset of `num_rows` rows, including the held-out ones."""
        return cls(seed, num_rows - len(held_out), held_out, data_order)

    @cached_property
    def remaining_before(self) -> Numbers:
        """Number of training rows before each held-out row."""
        return np.array(self.held_out) - np.arange(len(self.held_out))

    def rows(self, sample_numbers: Sequence[int]) -> list[int]:
        """Map sample number n to place n % num_rows of the permutation of epoch n // num_rows."""
        numbers = np.fromiter(sample_numbers, np.int64, len(sample_numbers))
        epochs, places = np.divmod(numbers, self.num_rows)
        rows = np.empty_like(numbers)
        for epoch in set(epochs.tolist()):
            inside = epochs == epoch
            rows[inside] = self.permuted(epoch, places[inside])
        if self.held_out:
            # Training row i is dataset row i + the number of held-out rows before it.
            rows += np.searchsorted(self.remaining_before, rows, side="right")
        found: list[int] = rows.tolist()
        return found

    def permuted(self, epoch: int, places: Numbers) -> Numbers:
        """Map places in an epoch to training rows."""
        if self.data_order == "sort" and self.num_rows >= MIN_SIZE:
            return sorted_permutation(self.seed, epoch, self.num_rows)[places]
        return permuted(self.seed, epoch, self.num_rows, places)


def derived_seed(seed: int, stream: str) -> int:
    """The seed of one of several independent orders of a run."""
    low, high = stream_key(seed, stream)
    return high << 32 | low


def permuted(seed: int, number: int, size: int, places: Numbers) -> Numbers:
    """Map places in range(size) by a seed's permutation `number`: sorted if small, else Feistel."""
    if size < MIN_SIZE:
        return small_permutation(seed, number, size)[places].astype(np.int64)
    return Permutation.of(seed, "data_order", number, size)(places)


@lru_cache(maxsize=128)  # Of as many buckets, 16 MiB.
def small_permutation(seed: int, number: int, size: int) -> NDArray[np.uint16]:
    """`rng.permutation` of less than MIN_SIZE elements."""
    return permutation(seed, number, size).numpy().astype(np.uint16)


@lru_cache(maxsize=2)  # A batch can span two epochs.
def sorted_permutation(seed: int, epoch: int, num_rows: int) -> Numbers:
    """`rng.permutation`, cached for the last two epochs."""
    return permutation(seed, epoch, num_rows).numpy()


@dataclass(frozen=True)
class LaterOrder:
    """An order whose first sample has the number `first`: a `SampleOrder`.

    For data that a run takes up when it has drawn `first` samples of other data: every sample of
    the run keeps a number of its own.
    """

    order: SampleOrder
    first: int

    @property
    def num_rows(self) -> int:
        """Samples of an epoch."""
        return self.order.num_rows

    def rows(self, sample_numbers: Sequence[int]) -> list[int]:
        """Map sample numbers from `first` on to rows."""
        return self.order.rows([number - self.first for number in sample_numbers])

    def skipped(self, ranges: Sequence[SampleRange]) -> tuple[SampleRange, ...]:
        """The run's skipped ranges within this order, counted from its own 0."""
        first = self.first
        return tuple((max(0, begin - first), end - first) for begin, end in ranges if end > first)


@dataclass(frozen=True)
class LaterPlan:
    """The steps of a `LaterOrder`: a `StepPlan`."""

    plan: StepPlan
    """The steps by the order's own sample numbers."""
    first: int

    def __call__(self, cursor: int) -> Step:
        """See `StepPlan`."""
        numbers, end, bucket = self.plan(cursor - self.first)
        return Step([number + self.first for number in numbers], end + self.first, bucket)


class Share(NamedTuple):
    """One data-parallel rank's share of a step."""

    numbers: Sequence[int]
    """Sample numbers."""
    size: int
    """Samples that the rank reads: copies of its last one, with weight 0, pad its share."""
    step_size: int
    """Samples of the step, on all ranks."""


@dataclass(frozen=True)
class RankOrder:
    """One data-parallel rank's share of every step, as (sample number, row) pairs.

    Shares are contiguous and differ by at most one sample.
    """

    plan: StepPlan
    sample_order: SampleOrder
    rank: int
    num_ranks: int
    sizes: tuple[int, ...] = ()
    """Samples per rank including padding, by bucket; empty for the largest share."""

    def share(self, step: Step) -> Share:
        """The rank's share of a step; never empty."""
        total, ranks = len(step.numbers), self.num_ranks
        first, end = self.rank * total // ranks, (self.rank + 1) * total // ranks
        size = self.sizes[step.bucket] if self.sizes else -(-total // ranks)
        return Share(step.numbers[first:end], size, total)

    def shares(self, cursor: int) -> Iterator[Share]:
        """Yield the shares of all steps from `cursor` on, endlessly."""
        return map(self.share, steps_from(self.plan, cursor))

    def batches(self, cursor: int) -> Iterator[list[tuple[int, int]]]:
        """Yield padded batches endlessly, from `cursor` on."""
        for mine, size, _ in self.shares(cursor):
            pairs = list(zip(mine, self.sample_order.rows(mine), strict=True))
            yield pairs + pairs[-1:] * (size - len(pairs))


SLOTS = 1 << 16


@dataclass(frozen=True)
class BlendOrder:
    """Sample number -> row; the datasets' rows are numbered one dataset after another."""

    orders: tuple[EpochOrder, ...]
    """The order of each dataset."""
    firsts: tuple[int, ...]
    """The first row of each dataset."""
    weights: tuple[float, ...]

    @classmethod
    def of(
        cls,
        seed: int,
        sizes: Sequence[int],
        weights: tuple[float, ...],
        held_out: Sequence[int],
        data_order: str,
    ) -> BlendOrder:
        """Return the order of datasets of `sizes` rows, which include the held-out ones.

        Raises UserError for a dataset whose rows are all held out.
        """
        ends = np.cumsum(sizes)
        firsts, rows = ends - sizes, np.array(held_out, dtype=np.int64)
        orders = []
        for number, (first, end) in enumerate(zip(firsts.tolist(), ends.tolist(), strict=True)):
            out = tuple((rows[(rows >= first) & (rows < end)] - first).tolist())
            if len(out) == end - first:
                raise UserError(
                    f"[data] weights={show(weights)}: paths[{number}] has {end - first} windows to "
                    f"train on and {len(out)} held out. Remove it, or shorten sequence_length."
                )
            orders.append(
                EpochOrder.of(derived_seed(seed, f"blend {number}"), end - first, out, data_order)
            )
        return cls(tuple(orders), tuple(firsts.tolist()), weights)

    @property
    def num_rows(self) -> int:
        """Samples per epoch: the number of rows. A blend repeats some rows before it uses all."""
        return sum(order.num_rows for order in self.orders)

    @cached_property
    def slots(self) -> tuple[Numbers, Numbers, Numbers]:
        """(slots of each dataset, dataset of each slot, number of a slot among its dataset's)."""
        exact = np.array(self.weights) / sum(self.weights) * (SLOTS - len(self.weights))
        counts = 1 + np.floor(exact).astype(np.int64)  # A dataset of tiny weight has one.
        largest = np.argsort(np.floor(exact) - exact, kind="stable")
        counts[largest[: SLOTS - counts.sum()]] += 1
        dataset = np.repeat(np.arange(len(counts)), counts)
        number = np.arange(SLOTS) - np.repeat(counts.cumsum() - counts, counts)
        spread = np.argsort((2 * number + 1) / counts[dataset], kind="stable")
        return counts, dataset[spread], number[spread]

    def rows(self, sample_numbers: Sequence[int]) -> list[int]:
        """Map each sample number to a dataset, and its order's sample to a row."""
        counts, dataset, number = self.slots
        blocks, slots = np.divmod(np.fromiter(sample_numbers, np.int64, len(sample_numbers)), SLOTS)
        chosen = dataset[slots]
        draws = blocks * counts[chosen] + number[slots]
        rows = np.empty_like(draws)
        for i in np.unique(chosen).tolist():
            inside = chosen == i
            rows[inside] = np.array(self.orders[i].rows(draws[inside].tolist())) + self.firsts[i]
        found: list[int] = rows.tolist()
        return found


class BlendedSource(Source):
    """Rows of several datasets, numbered one dataset after another; mixed if there are weights."""

    def __init__(self, counts: Sequence[int], weights: Sequence[float]) -> None:
        """`counts`: rows of each dataset; `weights`: share of each in the samples, or empty."""
        self.weights, self.counts = tuple(weights), np.array(counts)
        self.ends = self.counts.cumsum()

    def place_of(self, row: int) -> tuple[int, int]:
        """(number of the dataset, row in it) of a row. Raises IndexError."""
        if not 0 <= row < len(self):
            raise IndexError(f"sample {row} of {len(self)}")
        dataset = int(np.searchsorted(self.ends, row, side="right"))
        return dataset, row - int(self.ends[dataset] - self.counts[dataset])

    def order(
        self,
        seed: int,
        held_out: tuple[int, ...],
        data_order: str,
        batch_sizes: Sequence[int] = (),
    ) -> SampleOrder:
        """The order of training: a permutation per epoch, or a blend by weights."""
        if not self.weights:
            return super().order(seed, held_out, data_order, batch_sizes)
        return BlendOrder.of(seed, self.counts.tolist(), self.weights, held_out, data_order)
