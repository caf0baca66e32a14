"""Schedules with looped stages: GPipe, 1F1B, interleaved 1F1B, breadth-first, zero bubble.

Each function returns one rank's program: p ranks, m microbatches, v stages per rank.
"""

from __future__ import annotations

from collections.abc import Iterator

from titan_dit.config.section import UserError, show
from titan_dit.pipeline.schedules.schedule import (
    ANY_STAGE,
    Action,
    Kind,
    Order,
    Program,
    Schedule,
)


def gpipe(rank: int, p: int, m: int, v: int) -> Program:
    """All forwards, then all backwards (arXiv:1811.06965 sec. 2.3).

    With equal stages the bubble is (p - 1) / (m + p - 1) of the time. A rank holds m microbatches.
    """
    return [(Kind.FORWARD, rank)] * m + [(Kind.BACKWARD, rank)] * m


def one_forward_one_backward(rank: int, p: int, m: int, v: int) -> Program:
    """1F1B, PipeDream-Flush: each backward as early as possible (arXiv:2104.04473 sec. 2.2).

    The bubble is GPipe's, but a rank holds only min(m, p - rank) microbatches.
    """
    warmup = min(m, p - 1 - rank)
    forwards = [(Kind.FORWARD, rank)] * m
    backwards = [(Kind.BACKWARD, rank)] * m
    return _with_warmup(forwards, backwards, warmup)


def interleaved_1f1b(rank: int, p: int, m: int, v: int) -> Program:
    """1F1B with v stages per rank, in rounds (arXiv:2104.04473 sec. 2.2).

    In each round, `round_size` microbatches pass through one of the rank's stages. If `round_size`
    is p and all stages are equal, the bubble is (p - 1) / (v m + p - 1) of the time.
    """
    size = round_size(p, m)
    # Two more than on the next rank: one for the way of the forward, one for the backward's.
    warmup = min(v * m, (v - 1) * size + 2 * (p - 1 - rank))
    forwards = [(Kind.FORWARD, stage) for stage in _stage_sequence(rank, p, m, v)]
    backwards = [(Kind.BACKWARD, stage) for stage in reversed(_stage_sequence(rank, p, m, v))]
    return _with_warmup(forwards, backwards, warmup)


def looped_bfs(p: int, m: int, v: int) -> Order:
    """Breadth-first: all microbatches through a rank's stage before the next (arXiv:2211.05953).

    With equal stages and m >= p the bubble is (p - 1) / (v m + p - 1) of the time, as in
    interleaved 1F1B. A rank holds v * m microbatches of its stages. Backwards take the microbatches
    from the last to the first, as in torch.
    """

    def actions(rank: int) -> Iterator[Action]:
        stages = range(rank, p * v, p)
        for stage in stages:
            yield from (Action(Kind.FORWARD, stage, number) for number in range(m))
        for stage in reversed(stages):
            yield from (Action(Kind.BACKWARD, stage, number) for number in reversed(range(m)))

    return tuple(tuple(actions(rank)) for rank in range(p))


def interleaved_zero_bubble(rank: int, p: int, m: int, v: int) -> Iterator[tuple[Kind, int]]:
    """Interleaved 1F1B with delayed weight gradients in the bubbles (arXiv:2401.10241 sec. 2.3).

    With v = 1 this is ZB-H1: rank r delays up to r weight gradients, so that every rank holds
    min(m, p) microbatches, like rank 0 of 1F1B. If F, I and W take equally long on all stages, the
    bubble is (p - 1) / (3 v m + p - 1) of the time.
    """
    size = round_size(p, m)
    # One more, not two: an input gradient takes half of a full backward.
    warmup = min(v * m, (v - 1) * size + (p - 1 - rank))
    forwards = [(Kind.FORWARD, stage) for stage in _stage_sequence(rank, p, m, v)]
    inputs = [(Kind.BACKWARD_INPUT, stage) for stage in reversed(_stage_sequence(rank, p, m, v))]
    behind = 0
    for kind, stage in _with_warmup(forwards, inputs, warmup):
        yield kind, stage
        if kind is Kind.BACKWARD_INPUT:
            behind += 1
            if behind > rank:
                yield Kind.BACKWARD_WEIGHT, ANY_STAGE
                behind -= 1
    for _ in range(behind):
        yield Kind.BACKWARD_WEIGHT, ANY_STAGE


def round_size(num_ranks: int, num_microbatches: int) -> int:
    """Microbatches per stage and round of an interleaved schedule.

    arXiv:2104.04473 sec. 2.2 uses `num_ranks`. Here it may be more, to get equal rounds, or less,
    with fewer microbatches than ranks.
    """
    return num_microbatches // max(1, num_microbatches // num_ranks)


def rounds_are_equal(num_ranks: int, num_microbatches: int) -> bool:
    """True if the microbatches divide into equal rounds."""
    return num_microbatches % round_size(num_ranks, num_microbatches) == 0


def needs_equal_rounds(name: str, p: int, m: int, v: int) -> None:
    """Raise UserError if v > 1 and the m microbatches do not fill equal rounds over p ranks."""
    # One stage per rank has no rounds.
    if v > 1 and not rounds_are_equal(p, m):
        fewer, more = (_nearest(p, m, step) for step in (-1, 1))
        raise UserError(
            f"[pipeline] schedule={show(name)} on [parallel] pp={p} needs microbatches in {m // p} "
            f"equal rounds, but microbatches={m}. Set [training] microbatch_size or "
            f"global_batch_size so that a rank has {fewer} or {more}, or any multiple of pp."
        )


def _nearest(num_ranks: int, num_microbatches: int, step: int) -> int:
    """The nearest number of microbatches, up or down, that divides into equal rounds."""
    while not rounds_are_equal(num_ranks, num_microbatches):
        num_microbatches += step
    return num_microbatches


def _stage_sequence(rank: int, p: int, m: int, v: int) -> list[int]:
    """The stages of a rank's v * m forwards; reversed, those of its backwards."""
    size = round_size(p, m)
    return [((k // size) % v) * p + rank for k in range(v * m)]


def _with_warmup(
    forwards: list[tuple[Kind, int]], backwards: list[tuple[Kind, int]], warmup: int
) -> list[tuple[Kind, int]]:
    """`warmup` forwards, then alternating forwards and backwards, then the remaining backwards."""
    steady = len(forwards) - warmup
    pairs = zip(forwards[warmup:], backwards[:steady], strict=True)
    return forwards[:warmup] + [action for pair in pairs for action in pair] + backwards[steady:]


GPIPE = Schedule(program=gpipe, torch="GPipe")
ONE_F_ONE_B = Schedule(program=one_forward_one_backward, torch="1F1B")
INTERLEAVED_1F1B = Schedule(
    program=interleaved_1f1b,
    torch="Interleaved1F1B",
    interleaved=True,
    check=needs_equal_rounds,
)
LOOPED_BFS = Schedule(actions=looped_bfs, torch="LoopedBFS", interleaved=True)
INTERLEAVED_ZERO_BUBBLE = Schedule(
    program=interleaved_zero_bubble,
    torch="InterleavedZeroBubble",
    interleaved=True,
    splits_backward=True,
    check=needs_equal_rounds,
)
