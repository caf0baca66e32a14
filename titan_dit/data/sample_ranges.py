"""Sets of integers as half-open ranges (first, end)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from titan_dit.config import schema

SampleRange: TypeAlias = tuple[int, int]
MOST = 1 << 26
"""Numbers that a step can have, in a file."""


def wrong_ranges(ranges: Sequence[Sequence[int]]) -> str | None:
    """What is wrong with the ranges of a step, as a file has them."""
    if any(first > end for first, end in ranges):
        return "has a range that ends before it begins"
    total = sum(end - first for first, end in ranges)
    return f"has {total:,} numbers, too many for a step" if total > MOST else None


OF_STEP = schema.Ruled(schema.Rows((schema.COUNT, schema.COUNT)), wrong_ranges)
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
