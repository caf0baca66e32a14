"""Which samples come when: pure functions of the seed and one integer, the cursor.

The cursor counts samples from the start of training. No rank and no worker holds a position of its
own, so a run resumes exactly on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain

import torch
from torch import Tensor

from titan_dit.data.sample_ranges import SampleRange
from titan_dit.rng import permutation


@dataclass(frozen=True)
class BatchPlan:
    """Fixed batches: cursor -> (the step's sample numbers, the next cursor).

    `skipped` numbers, ascending spans that do not touch, are in no batch: a batch that meets one
    goes on behind it.
    """

    global_batch_size: int
    skipped: tuple[SampleRange, ...] = ()

    def __call__(self, cursor: int) -> tuple[Sequence[int], int]:
        """The sample numbers of the step that starts at `cursor`, ascending."""
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
    """Sample number -> row of the dataset: every row once per epoch, each epoch in its order."""

    seed: int
    num_rows: int
    """Rows that are trained on."""
    held_out: tuple[int, ...] = ()
    """Rows of the dataset that are not, ascending."""

    @classmethod
    def of(cls, seed: int, num_rows: int, held_out: tuple[int, ...] = ()) -> EpochOrder:
        """That of a dataset of so many rows."""
        return cls(seed, num_rows - len(held_out), held_out)

    @cached_property
    def remaining_before(self) -> Tensor:
        """How many of the remaining rows stand before each held-out one."""
        return torch.tensor(self.held_out) - torch.arange(len(self.held_out))

    def rows(self, sample_numbers: Sequence[int]) -> list[int]:
        """Of each: epoch n // N, place n % N in that epoch's permutation."""
        numbers = torch.tensor(sample_numbers)
        epochs, places = numbers // self.num_rows, numbers % self.num_rows
        rows = torch.empty_like(numbers)
        for epoch in set(epochs.tolist()):
            inside = epochs == epoch
            rows[inside] = epoch_permutation(self.seed, epoch, self.num_rows)[places[inside]]
        if self.held_out:
            # Of the rows that remain, number i has i of them before it, and some held-out ones.
            rows = rows + torch.searchsorted(self.remaining_before, rows, right=True)
        return rows.tolist()


@lru_cache(maxsize=2)  # A batch can lie across the end of an epoch.
def epoch_permutation(seed: int, epoch: int, num_rows: int) -> Tensor:
    """`rng.permutation`, kept while the epoch lasts."""
    return permutation(seed, epoch, num_rows)


@dataclass(frozen=True)
class RankOrder:
    """The part of every batch that one data-parallel rank reads: (sample number, row) pairs.

    The shares are consecutive and differ by one sample at most. Every rank reads equally many
    `rows`: those beyond its share repeat its last sample and are to have no weight.
    """

    plan: BatchPlan
    epochs: EpochOrder
    rank: int
    num_ranks: int
    rows: int | None = None
    """Rows of every rank; None for as many as the largest share."""

    @property
    def bounds(self) -> SampleRange:
        """First and end of the share within a batch. No rank's is empty."""
        size = self.plan.global_batch_size
        return self.rank * size // self.num_ranks, (self.rank + 1) * size // self.num_ranks

    @property
    def num_real(self) -> int:
        """Rows that are the rank's own samples; the others follow them."""
        first, end = self.bounds
        return end - first

    @property
    def num_rows(self) -> int:
        """Rows of every rank's batch."""
        return self.rows or -(-self.plan.global_batch_size // self.num_ranks)

    def share(self, cursor: int) -> Sequence[int]:
        """The rank's own sample numbers in the step that starts at `cursor`."""
        return self.plan(cursor)[0][slice(*self.bounds)]

    def batches(self, cursor: int) -> Iterator[list[tuple[int, int]]]:
        """Endlessly, from `cursor` on."""
        while True:
            mine = self.share(cursor)
            pairs = list(zip(mine, self.epochs.rows(mine), strict=True))
            yield pairs + pairs[-1:] * (self.num_rows - len(pairs))
            _, cursor = self.plan(cursor)
