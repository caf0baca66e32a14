"""The sample order of a blend: datasets mixed by weights, a pure function of the sample number.

Sample numbers are cut into blocks of `SLOTS`. In every block the same slots belong to a dataset, in
proportion to its weight and evenly spread. Its k-th slot since the start of training takes the k-th
sample of an order of its own: each dataset has its own epochs, in each of which each of its rows
comes once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from titan_dit.config.section import UserError, show
from titan_dit.data.base import SampleOrder, Source
from titan_dit.data.order import EpochOrder, Numbers
from titan_dit.rng import stream_key

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
        """Return the order of datasets of `sizes` rows, which include the held-out ones."""
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
            low, high = stream_key(seed, f"blend {number}")
            orders.append(EpochOrder.of(high << 32 | low, end - first, out, data_order))
        return cls(tuple(orders), tuple(firsts.tolist()), weights)

    @property
    def num_rows(self) -> int:
        """Samples of an epoch: as many as there are rows, though a blend repeats some first."""
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
        """`counts`: rows of each dataset; `weights`: share of each in the samples, or none."""
        self.weights, self.counts = tuple(weights), np.array(counts)
        self.ends = self.counts.cumsum()

    def place_of(self, row: int) -> tuple[int, int]:
        """(number of the dataset, row in it) of a row."""
        if not 0 <= row < len(self):
            raise IndexError(f"sample {row} of {len(self)}")
        dataset = int(np.searchsorted(self.ends, row, side="right"))
        return dataset, row - int(self.ends[dataset] - self.counts[dataset])

    def order(self, seed: int, held_out: tuple[int, ...], data_order: str) -> SampleOrder:
        """Return the order of training: a permutation an epoch, or a blend by weights."""
        if not self.weights:
            return super().order(seed, held_out, data_order)
        return BlendOrder.of(seed, self.counts.tolist(), self.weights, held_out, data_order)
