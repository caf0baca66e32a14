"""Layers per pipeline stage, such that the slowest stage is as fast as possible."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from titan_dit.config.section import UserError, show


@lru_cache(maxsize=4096)  # A search asks for the same stages thousands of times.
def split_layers(
    num_layers: int, num_stages: int, *, embed: float = 0.0, head: float = 0.0
) -> tuple[int, ...]:
    """Layers per stage, at least one, that minimise the cost of the slowest stage.

    `embed` and `head`: extra costs of the first and last stage, in layers. Ties are broken by the
    smallest sum of squared costs, then by the fewest layers in the first stages, where 1F1B holds
    the most activations. Raises UserError if there are fewer layers than stages.
    """
    if num_layers < num_stages:
        raise UserError(
            f"{num_stages} pipeline stages ([parallel] pp x stages per rank) need at least as many "
            f"layers, but the model has {num_layers}. Reduce pp or [pipeline] virtual_stages."
        )
    extra = [0.0] * num_stages
    extra[0] += embed
    extra[-1] += head
    limit = _smallest_limit(num_layers, extra)
    # best[n]: (sum of squares, layers per stage) of n layers on the stages so far, last to first.
    # Comparing the tuples breaks ties in favour of few layers in the first stages.
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
    """Maximum layers, up to `num_layers`, of a stage with this extra cost within the limit."""
    # Count down instead of dividing: the same sums as the limits, with the same rounding.
    return next((n for n in range(num_layers, 0, -1) if n + cost <= limit), 0)


def _smallest_limit(num_layers: int, extra: Sequence[float]) -> float:
    """The smallest possible cost of the slowest stage; tries every possible cost of a stage."""
    limits = sorted({n + cost for n in range(1, num_layers + 1) for cost in extra})
    for limit in limits:
        room = [_most_layers(limit, cost, num_layers) for cost in extra]
        if min(room) > 0 and sum(room) >= num_layers:
            return limit
    raise AssertionError("The last limit has room for every layer on one stage.")


def check_split(split: Sequence[int], num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Return the user's split; UserError if it does not fit the layers or the stages."""
    where = f"[pipeline] split={show(split)}"
    if len(split) != num_stages:
        raise UserError(
            f"{where} has {len(split)} stages, but there are {num_stages} ([parallel] pp x "
            f"stages per rank). Set {num_stages} numbers, or split=[] to balance."
        )
    if min(split) < 1:
        raise UserError(f"{where}: every stage needs at least one layer.")
    if sum(split) != num_layers:
        raise UserError(
            f"{where} adds up to {sum(split)} layers, but the model has {num_layers}. "
            "Correct the sum, or set split=[] to balance."
        )
    return tuple(split)


def layers_of_stages(split: Sequence[int]) -> tuple[range, ...]:
    """The global indices of every stage's layers."""
    ends = tuple(accumulate(split))
    return tuple(range(end - count, end) for count, end in zip(split, ends, strict=True))
