"""Orders in which the stages go round the ranks: GPipe, 1F1B, interleaved, zero bubble.

Each function writes the program of one rank: p ranks, m microbatches, v stages per rank.
"""

from __future__ import annotations

from collections.abc import Iterator

from titan_dit.config.section import UserError, show
from titan_dit.schedules.action import ANY_STAGE, Kind, Program
from titan_dit.schedules.schedule import Schedule


def gpipe(rank: int, p: int, m: int, v: int) -> Program:
    """All forwards, then all backwards (arXiv:1811.06965 sec. 2.3).

    With forward and backward as slow on every stage, (p - 1) / (m + p - 1) of the time is idle; a
    rank holds all m microbatches.
    """
    return [(Kind.FORWARD, rank)] * m + [(Kind.BACKWARD, rank)] * m


def one_forward_one_backward(rank: int, p: int, m: int, v: int) -> Program:
    """A backward as soon as there is one: PipeDream-Flush, 1F1B (arXiv:2104.04473 sec. 2.2).

    Idle like GPipe, but a rank holds min(m, p - rank) microbatches.
    """
    ahead = min(m, p - 1 - rank)
    forwards = [(Kind.FORWARD, rank)] * m
    backwards = [(Kind.BACKWARD, rank)] * m
    return _one_of_each(forwards, backwards, ahead)


def interleaved_1f1b(rank: int, p: int, m: int, v: int) -> Program:
    """1F1B over v stages per rank, round by round (arXiv:2104.04473 sec. 2.2).

    A rank takes `round_size` microbatches through one of its stages, then through the next. With
    rounds of p and equal stages, (p - 1) / (v m + p - 1) of the time is idle.
    """
    size = round_size(p, m)
    # Each rank up front is ahead by two: one for the forward's way down, one for the backward's up.
    ahead = min(v * m, (v - 1) * size + 2 * (p - 1 - rank))
    forwards = [(Kind.FORWARD, stage) for stage in _round_trip(rank, p, m, v)]
    backwards = [(Kind.BACKWARD, stage) for stage in reversed(_round_trip(rank, p, m, v))]
    return _one_of_each(forwards, backwards, ahead)


def interleaved_zero_bubble(rank: int, p: int, m: int, v: int) -> Iterator[tuple[Kind, int]]:
    """Interleaved 1F1B with weight gradients put off into the gaps (arXiv:2401.10241 sec. 2.3).

    ZB-H1 when v = 1: rank r is up to r weight gradients behind its input gradients, so that every
    rank holds min(m, p) microbatches, as the first rank of 1F1B does. With equal stages and all
    three kinds equally long, (p - 1) / (3 v m + p - 1) of the time is idle.
    """
    size = round_size(p, m)
    # By one, not two: the way up is now as short as an input gradient.
    ahead = min(v * m, (v - 1) * size + (p - 1 - rank))
    forwards = [(Kind.FORWARD, stage) for stage in _round_trip(rank, p, m, v)]
    inputs = [(Kind.BACKWARD_INPUT, stage) for stage in reversed(_round_trip(rank, p, m, v))]
    behind = 0
    for kind, stage in _one_of_each(forwards, inputs, ahead):
        yield kind, stage
        if kind is Kind.BACKWARD_INPUT:
            behind += 1
            if behind > rank:
                yield Kind.BACKWARD_WEIGHT, ANY_STAGE
                behind -= 1
    for _ in range(behind):
        yield Kind.BACKWARD_WEIGHT, ANY_STAGE


def round_size(num_ranks: int, num_microbatches: int) -> int:
    """Microbatches that an interleaved rank takes through one stage before it turns to the next.

    `num_ranks` in arXiv:2104.04473 sec. 2.2. It may be more, as long as all rounds are equal, and
    it is less where there are fewer microbatches than ranks.
    """
    return num_microbatches // max(1, num_microbatches // num_ranks)


def rounds_are_equal(num_ranks: int, num_microbatches: int) -> bool:
    """Whether the microbatches fall into equal rounds."""
    return num_microbatches % round_size(num_ranks, num_microbatches) == 0


def needs_equal_rounds(name: str, p: int, m: int, v: int) -> None:
    """Raise UserError unless the microbatches fall into equal rounds."""
    # With one stage per rank there is nothing to turn to, and any number will do.
    if v > 1 and not rounds_are_equal(p, m):
        fewer, more = (_nearest(p, m, step) for step in (-1, 1))
        raise UserError(
            f"[pipeline] schedule={show(name)} on [parallel] pp={p} needs microbatches in {m // p} "
            f"equal rounds, but microbatches={m}. Set [training] microbatch_size or "
            f"global_batch_size so that a rank has {fewer} or {more} of them, or any multiple "
            "of pp."
        )


def _nearest(num_ranks: int, num_microbatches: int, step: int) -> int:
    """The next number of microbatches up or down that falls into equal rounds."""
    while not rounds_are_equal(num_ranks, num_microbatches):
        num_microbatches += step
    return num_microbatches


def _round_trip(rank: int, p: int, m: int, v: int) -> list[int]:
    """The stage of each of a rank's v * m forwards; its backwards run through it from the end."""
    size = round_size(p, m)
    return [((k // size) % v) * p + rank for k in range(v * m)]


def _one_of_each(
    forwards: list[tuple[Kind, int]], backwards: list[tuple[Kind, int]], ahead: int
) -> list[tuple[Kind, int]]:
    """`ahead` forwards, then a forward and a backward in turn, then the backwards left over."""
    steady = len(forwards) - ahead
    pairs = zip(forwards[ahead:], backwards[:steady], strict=True)
    return forwards[:ahead] + [action for pair in pairs for action in pair] + backwards[steady:]


GPIPE = Schedule(program=gpipe)
ONE_F_ONE_B = Schedule(program=one_forward_one_backward)
INTERLEAVED_1F1B = Schedule(program=interleaved_1f1b, interleaved=True, check=needs_equal_rounds)
INTERLEAVED_ZERO_BUBBLE = Schedule(
    program=interleaved_zero_bubble,
    interleaved=True,
    splits_backward=True,
    check=needs_equal_rounds,
)
