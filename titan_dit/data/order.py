"""The sample order: a pure function of the seed and one integer, the cursor.

The cursor counts samples from the start of training. Ranks and workers hold no position, so a run
resumes exactly on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from titan_dit.data.base import SampleOrder
from titan_dit.data.feistel import LEAST_SIZE, Permutation
from titan_dit.data.sample_ranges import SampleRange
from titan_dit.rng import permutation

Numbers: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True)
class BatchPlan:
    """Global batches: cursor -> (the step's sample numbers, the next cursor).

    No batch contains the `skipped` ranges, which are ascending and disjoint.
    """

    global_batch_size: int
    skipped: tuple[SampleRange, ...] = ()

    def __call__(self, cursor: int) -> tuple[Sequence[int], int]:
        """Return the step's ascending sample numbers from `cursor` on, and the next cursor."""
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
        return numbers, cursor + wanted


@dataclass(frozen=True)
class EpochOrder:
    """Sample number -> dataset row; every epoch is a new permutation of the training rows."""

    seed: int
    num_rows: int
    """Number of training rows."""
    held_out: tuple[int, ...] = ()
    """Rows held out of training, ascending."""
    data_order: str = "feistel"
    """[job] data_order: feistel, or sort for older runs; the same for few rows."""

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
        if self.data_order == "sort" or self.num_rows < LEAST_SIZE:
            return sorted_permutation(self.seed, epoch, self.num_rows)[places]
        return Permutation.of(self.seed, "data_order", epoch, self.num_rows)(places)


@lru_cache(maxsize=2)  # A batch can span two epochs.
def sorted_permutation(seed: int, epoch: int, num_rows: int) -> Numbers:
    """`rng.permutation`, cached for the last two epochs."""
    return permutation(seed, epoch, num_rows).numpy()


@dataclass(frozen=True)
class RankOrder:
    """One data-parallel rank's share of every batch: (sample number, row) pairs.

    Shares are contiguous and differ by at most one sample. Every rank reads `size` samples: it
    pads its share with copies of its last sample, which have weight 0.
    """

    plan: BatchPlan
    epochs: SampleOrder
    rank: int
    num_ranks: int
    size: int | None = None
    """Samples per rank including padding; None for the largest share."""

    @property
    def bounds(self) -> SampleRange:
        """(first, end) of the share within a batch; never empty."""
        batch = self.plan.global_batch_size
        return self.rank * batch // self.num_ranks, (self.rank + 1) * batch // self.num_ranks

    @property
    def num_real(self) -> int:
        """Samples before the padding."""
        first, end = self.bounds
        return end - first

    @property
    def padded_size(self) -> int:
        """Samples per rank including padding."""
        return self.size or -(-self.plan.global_batch_size // self.num_ranks)

    def share(self, cursor: int) -> Sequence[int]:
        """Return the rank's unpadded sample numbers of the step that starts at `cursor`."""
        return self.plan(cursor)[0][slice(*self.bounds)]

    def batches(self, cursor: int) -> Iterator[list[tuple[int, int]]]:
        """Yield padded batches endlessly, from `cursor` on."""
        while True:
            mine = self.share(cursor)
            pairs = list(zip(mine, self.epochs.rows(mine), strict=True))
            yield pairs + pairs[-1:] * (self.padded_size - len(pairs))
            _, cursor = self.plan(cursor)
