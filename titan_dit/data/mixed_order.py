"""The order of rows of several datasets: a pure function of the seed and a place in the stream.

The stream is endless and comes in passes. A dataset gives a fixed number of samples to each pass,
its rate, which may be a fraction: pass p has

    floor((p + 1) rate) - floor(p rate)

samples of it, and a keyed permutation orders the samples of all datasets in the pass. The samples
of a dataset are an endless stream, too: its rows, permuted anew each time all have come. So after p
passes a dataset has given floor(p rate) samples, and each of its rows as often as any other, but
for one. A dataset of N rows that come k times in a pass has the rate k N.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np

from titan_dit.data.order import EpochOrder, Numbers, derived_seed, permuted
from titan_dit.data.sections import DatasetConfig


def rates(datasets: Sequence[DatasetConfig], sizes: Sequence[int]) -> list[int | Fraction]:
    """Times that a row of each dataset comes in an epoch; `sizes`: rows of each.

    An epoch of datasets with weights has as many samples as they have rows. Weights are exact as
    they are written: 0.1 is a tenth.
    """
    weights = [Fraction(str(each.weight)) for each in datasets if each.weight is not None]
    if not weights:
        return [each.repeats for each in datasets]
    unit = Fraction(sum(sizes)) / sum(weights)
    return [weight * unit / size for weight, size in zip(weights, sizes, strict=True)]


@dataclass(frozen=True)
class Part:
    """The rows of one dataset in a stream."""

    first: int
    """Its first row, counted from the first one of the stream; the others follow."""
    num_rows: int
    """Rows, including those held out for validation."""
    rate: int | Fraction
    """Samples of a pass, above 0."""
    held_out: tuple[int, ...] = ()
    """Its rows held out of training, ascending, counted from `first`."""

    @property
    def num_training_rows(self) -> int:
        """Rows to train on."""
        return self.num_rows - len(self.held_out)

    def before(self, number: int) -> int:
        """Its samples before a pass."""
        return number * self.rate // 1


@dataclass(frozen=True)
class MixedOrder:
    """Place in the stream -> row. A `SampleOrder`."""

    seed: int
    parts: tuple[Part, ...]

    @property
    def rate(self) -> int | Fraction:
        """Samples of a pass, in the mean."""
        return sum(part.rate for part in self.parts)

    @property
    def num_rows(self) -> int:
        """Samples of an epoch."""
        return int(self.rate)

    def before(self, number: int) -> int:
        """Samples before a pass."""
        return sum(part.before(number) for part in self.parts)

    def pass_of(self, place: int) -> int:
        """The pass that holds a place.

        Pass p begins less than one sample of each dataset before p * rate, which bounds the search.
        """
        least = place // self.rate
        most = (place + len(self.parts)) // self.rate + 1
        return least - 1 + bisect_right(range(least, most + 1), place, key=self.before)

    def rows(self, sample_numbers: Sequence[int]) -> list[int]:
        """Map places, in any order, to rows."""
        places = np.fromiter(sample_numbers, np.int64, len(sample_numbers))
        rows = np.full(len(places), -1)
        while len(left := np.flatnonzero(rows < 0)):  # Once for each pass that has places here.
            number = self.pass_of(int(places[left[0]]))
            first, end = self.before(number), self.before(number + 1)
            inside = left[(places[left] >= first) & (places[left] < end)]
            rows[inside] = self.rows_of_pass(number, places[inside] - first)
        found: list[int] = rows.tolist()
        return found

    def rows_of_pass(self, number: int, places: Numbers) -> Numbers:
        """Map places in a pass to rows."""
        before = [part.before(number) for part in self.parts]
        ends = np.cumsum([part.before(number + 1) for part in self.parts]) - np.cumsum(before)
        drawn = permuted(self.seed, number, int(ends[-1]), places)
        of_part = np.searchsorted(ends, drawn, side="right")
        rows = np.empty_like(drawn)
        for i in np.unique(of_part).tolist():
            inside = of_part == i
            samples = drawn[inside] - (int(ends[i - 1]) if i else 0) + before[i]
            rows[inside] = np.array(self.streams[i].rows(samples.tolist())) + self.parts[i].first
        return rows

    @cached_property
    def streams(self) -> tuple[EpochOrder, ...]:
        """The endless stream of each dataset's rows."""
        return tuple(
            EpochOrder(
                derived_seed(self.seed, f"dataset {number}"), part.num_training_rows, part.held_out
            )
            for number, part in enumerate(self.parts)
        )
