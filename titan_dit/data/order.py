"""Which samples come when: pure functions of the seed and one integer, the cursor.

The cursor counts samples from the start of training. No rank and no worker holds a position of its
own, so a run resumes exactly on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from titan_dit.rng import permutation


@dataclass(frozen=True)
class BatchPlan:
    """Fixed batches: cursor -> (the step's sample numbers, the next cursor)."""

    global_batch_size: int

    def __call__(self, cursor: int) -> tuple[range, int]:
        """The sample numbers of the step that starts at `cursor`."""
        end = cursor + self.global_batch_size
        return range(cursor, end), end


@dataclass(frozen=True)
class EpochOrder:
    """Sample number -> row of the dataset: every row once per epoch, each epoch in its order."""

    seed: int
    num_rows: int

    def rows(self, sample_numbers: Sequence[int]) -> list[int]:
        """Of each: epoch n // N, place n % N in that epoch's permutation."""
        numbers = torch.tensor(sample_numbers)
        epochs, places = numbers // self.num_rows, numbers % self.num_rows
        rows = torch.empty_like(numbers)
        for epoch in set(epochs.tolist()):
            inside = epochs == epoch
            rows[inside] = epoch_permutation(self.seed, epoch, self.num_rows)[places[inside]]
        return rows.tolist()


@lru_cache(maxsize=2)  # A batch can lie across the end of an epoch.
def epoch_permutation(seed: int, epoch: int, num_rows: int) -> Tensor:
    """`rng.permutation`, kept while the epoch lasts."""
    return permutation(seed, epoch, num_rows)


@dataclass(frozen=True)
class RankOrder:
    """The part of every batch that one data-parallel rank reads: (sample number, row) pairs."""

    plan: BatchPlan
    epochs: EpochOrder
    rank: int
    num_ranks: int

    def batches(self, cursor: int) -> Iterator[list[tuple[int, int]]]:
        """Endlessly, from `cursor` on: consecutive samples of each global batch."""
        while True:
            numbers, cursor = self.plan(cursor)
            share = len(numbers) // self.num_ranks
            mine = numbers[self.rank * share : (self.rank + 1) * share]
            yield list(zip(mine, self.epochs.rows(mine), strict=True))
