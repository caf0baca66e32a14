"""Sets of whole numbers as runs: (first, end) pairs, `end` not among them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

Span: TypeAlias = tuple[int, int]


def spans_of(numbers: Iterable[int]) -> list[Span]:
    """The runs that ascending numbers fall into, such as 3 4 5 8 -> (3, 6) (8, 9)."""
    found: list[Span] = []
    for number in numbers:
        if found and found[-1][1] == number:
            found[-1] = (found[-1][0], number + 1)
        else:
            found.append((number, number + 1))
    return found


def numbers_of(spans: Iterable[Sequence[int]]) -> Iterator[int]:
    """The numbers themselves, in the order of the spans."""
    for first, end in spans:
        yield from range(first, end)


def merged(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The union in ascending order: no two of the result touch, none is empty."""
    result: list[Span] = []
    for first, end in sorted(span for span in spans if span[0] < span[1]):
        if result and first <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((first, end))
    return tuple(result)


def count(spans: Iterable[Span], below: int | None = None) -> int:
    """How many numbers there are in spans that do not overlap, at most `below`'s predecessors."""
    ends = ((first, end if below is None else min(end, below)) for first, end in spans)
    return sum(max(0, end - first) for first, end in ends)
