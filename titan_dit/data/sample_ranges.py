"""Sets of whole numbers as runs: (first, end) pairs, `end` not among them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

SampleRange: TypeAlias = tuple[int, int]


def ranges_of(numbers: Iterable[int]) -> list[SampleRange]:
    """The runs that ascending numbers fall into, such as 3 4 5 8 -> (3, 6) (8, 9)."""
    found: list[SampleRange] = []
    for number in numbers:
        if found and found[-1][1] == number:
            found[-1] = (found[-1][0], number + 1)
        else:
            found.append((number, number + 1))
    return found


def numbers_of(ranges: Iterable[Sequence[int]]) -> Iterator[int]:
    """The numbers themselves, in the order of the ranges."""
    for first, end in ranges:
        yield from range(first, end)


def merged(ranges: Iterable[SampleRange]) -> tuple[SampleRange, ...]:
    """The union in ascending order: no two of the result touch, none is empty."""
    result: list[SampleRange] = []
    for first, end in sorted(one for one in ranges if one[0] < one[1]):
        if result and first <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((first, end))
    return tuple(result)


def count(ranges: Iterable[SampleRange], below: int | None = None) -> int:
    """How many numbers there are in ranges that do not overlap, at most `below`'s predecessors."""
    ends = ((first, end if below is None else min(end, below)) for first, end in ranges)
    return sum(max(0, end - first) for first, end in ends)
