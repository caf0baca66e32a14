"""How many layers each stage holds, so that the slowest stage is as fast as can be."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from titan_dit.config.section import UserError, show


def split_layers(
    num_layers: int, num_stages: int, *, embed: float = 0.0, head: float = 0.0
) -> tuple[int, ...]:
    """Layers per stage, at least one each, with the smallest possible cost of the dearest stage.

    `embed` and `head` are the extra costs of the first and the last stage, in layers. Of the splits
    that are equally good there, the most even one (smallest sum of squared costs) is taken, and of
    those the one with the fewest layers in front, where 1F1B holds the most activations.

    Raises UserError where there are fewer layers than stages.
    """
    if num_layers < num_stages:
        raise UserError(
            f"{num_stages} pipeline stages ([parallel] pp x stages per rank) need as many layers, "
            f"but the model has {num_layers}. Set a smaller pp or [pipeline] virtual_stages."
        )
    extra = [0.0] * num_stages
    extra[0] += embed
    extra[-1] += head
    limit = _smallest_limit(num_layers, extra)
    # best[n]: (sum of squares, layers per stage) for n layers on the stages seen so far, from the
    # last to the first. Comparing the tuples breaks ties in favour of few layers in front.
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for cost in reversed(extra):
        grown: dict[int, tuple[float, tuple[int, ...]]] = {}
        for held, (squares, split) in best.items():
            for count in range(1, _most_layers(limit, cost, num_layers - held) + 1):
                option = (squares + (count + cost) ** 2, (count, *split))
                grown[held + count] = min(option, grown.get(held + count, option))
        best = grown
    return best[num_layers][1]


def _most_layers(limit: float, cost: float, num_layers: int) -> int:
    """How many of `num_layers` a stage of that extra cost can hold within the limit."""
    # Counting down compares the very sums that the limits were made of, with their rounding.
    return next((n for n in range(num_layers, 0, -1) if n + cost <= limit), 0)


def _smallest_limit(num_layers: int, extra: Sequence[float]) -> float:
    """The least cost of the dearest stage: the limit is reached by some stage, so try each."""
    limits = sorted({n + cost for n in range(1, num_layers + 1) for cost in extra})
    for limit in limits:
        room = [_most_layers(limit, cost, num_layers) for cost in extra]
        if min(room) > 0 and sum(room) >= num_layers:
            return limit
    raise AssertionError("The last limit has room for every layer on one stage.")


def check_split(split: Sequence[int], num_layers: int, num_stages: int) -> tuple[int, ...]:
    """A split that the user gave, or a UserError if it does not fit the model and the stages."""
    where = f"[pipeline] split={show(split)}"
    if len(split) != num_stages:
        raise UserError(
            f"{where} is for {len(split)} stages, but there are {num_stages} ([parallel] pp x "
            f"stages per rank). Give {num_stages} numbers, or split=[] to have it balanced."
        )
    if min(split) < 1:
        raise UserError(f"{where}: every stage needs at least one layer.")
    if sum(split) != num_layers:
        raise UserError(
            f"{where} adds up to {sum(split)} layers, but the model has {num_layers}. "
            "Set numbers that add up, or split=[] to have it balanced."
        )
    return tuple(split)


def layers_of_stages(split: Sequence[int]) -> tuple[range, ...]:
    """The global indices of every stage's layers."""
    ends = tuple(accumulate(split))
    return tuple(range(end - count, end) for count, end in zip(split, ends, strict=True))
