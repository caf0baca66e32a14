"""Stages of a pipeline: their layers and ranks, and the order of every schedule.

Layers are split so that the slowest stage is as fast as possible. There are two placements. Loop:
rank r holds stages r, r + pp, r + 2 pp, ... V: rank r holds stages r and 2 pp - 1 - r, so rank 0
has both ends of the model (arXiv:2401.10241 sec. 6).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from titan_dit.config.section import UserError, show
from titan_dit.pipeline.schedules.schedule import Order, schedule_of, with_microbatches


@lru_cache(maxsize=4096)  # A search asks for the same stages thousands of times.
def split_layers(
    costs: tuple[float, ...], num_stages: int, *, embed: float = 0.0, head: float = 0.0
) -> tuple[int, ...]:
    """Layers per stage, at least one, that minimise the cost of the slowest stage.

    `costs`: of every layer. `embed` and `head`: extra costs of the first and last stage. Ties are
    broken by the smallest sum of squared costs, then by the fewest layers in the first stages,
    where 1F1B holds the most activations. Raises UserError if there are fewer layers than stages.
    """
    num_layers = len(costs)
    if num_layers < num_stages:
        raise UserError(
            f"{num_stages} pipeline stages ([parallel] pp x stages per rank) need at least as many "
            f"layers, but the model has {num_layers}. Reduce pp or [pipeline] virtual_stages."
        )
    extra = [0.0] * num_stages
    extra[0] += embed
    extra[-1] += head
    before = tuple(accumulate(costs, initial=0.0))
    limit = _smallest_limit(before, extra)
    # best[first]: (sum of squares, layers per stage) of the layers from `first` on, on the stages
    # so far, last to first. Comparing the tuples breaks ties in favour of few layers in the first
    # stages.
    best: dict[int, tuple[float, tuple[int, ...]]] = {num_layers: (0.0, ())}
    for cost in reversed(extra):
        grown: dict[int, tuple[float, tuple[int, ...]]] = {}
        for end, (squares, split) in best.items():
            for first in range(end - 1, -1, -1):
                own = before[end] - before[first] + cost
                if own > limit:
                    break
                option = (squares + own**2, (end - first, *split))
                grown[first] = min(option, grown.get(first, option))
        best = grown
    return best[0][1]


def _fits(before: Sequence[float], extra: Sequence[float], limit: float) -> bool:
    """True if stages of at most this cost, filled one after another, have room for every layer."""
    first, num_layers = 0, len(before) - 1
    for stage, cost in enumerate(extra):
        end, most = first, num_layers - (len(extra) - 1 - stage)
        while end < most and before[end + 1] - before[first] + cost <= limit:
            end += 1
        if end == first:
            return False
        first = end
    return first == num_layers


def _smallest_limit(before: Sequence[float], extra: Sequence[float]) -> float:
    """The smallest possible cost of the slowest stage, among all possible costs of a stage.

    `before`: costs of all layers before each, and of all.
    """
    ends = range(1, len(before))
    sums = {before[end] - before[first] for end in ends for first in range(end)}
    limits = sorted({one + cost for one in sums for cost in set(extra)})
    return limits[bisect_left(limits, True, key=lambda limit: _fits(before, extra, limit))]


def check_split(split: Sequence[int], num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Return the user's split; UserError if it does not fit the layers or the stages."""
    where = f"[pipeline] split={show(split)}"
    if len(split) != num_stages:
        raise UserError(
            f"{where} has {len(split)} stages, but there are {num_stages} ([parallel] pp x "
            f"stages per rank). Set {num_stages} numbers, or split=[] to balance."
        )
    if min(split) < 1:
        raise UserError(f"{where} has an empty stage. Give every stage at least one layer.")
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


def stages_per_rank(schedule: str, virtual_stages: int = 1) -> int:
    """Stages per rank: virtual_stages if interleaved, two if V-shaped, else one.

    Raises UserError for an unknown schedule, or if the user's `virtual_stages` does not fit it.
    """
    found = schedule_of(schedule)
    if virtual_stages < 1:
        raise UserError(f"[pipeline] virtual_stages={virtual_stages} must be at least 1.")
    if found.interleaved:
        return virtual_stages
    if found.v_shaped:
        if virtual_stages not in (1, 2):
            raise UserError(
                f"[pipeline] schedule={show(schedule)} always has two stages per rank, but "
                f"virtual_stages={virtual_stages}. Remove virtual_stages, or use an "
                "interleaved schedule."
            )
        return 2
    if virtual_stages != 1:
        raise UserError(
            f"[pipeline] schedule={show(schedule)} has one stage per rank, but "
            f'virtual_stages={virtual_stages}. Set schedule="interleaved_1f1b" or virtual_stages=1.'
        )
    return 1


def stages_of_rank(
    schedule: str, rank: int, num_ranks: int, virtual_stages: int = 1
) -> tuple[int, ...]:
    """The stages of pipeline rank `rank`, in model order."""
    num = stages_per_rank(schedule, virtual_stages)
    if schedule_of(schedule).v_shaped:
        return rank, 2 * num_ranks - 1 - rank
    return tuple(chunk * num_ranks + rank for chunk in range(num))


def rank_of_stage(schedule: str, stage: int, num_ranks: int) -> int:
    """The pipeline rank of `stage`."""
    if schedule_of(schedule).v_shaped:
        return min(stage, 2 * num_ranks - 1 - stage)
    return stage % num_ranks


def check_schedule(
    schedule: str, *, num_ranks: int, num_microbatches: int, virtual_stages: int = 1
) -> None:
    """Raise UserError unless the schedule supports these microbatches, ranks and stages."""
    num = stages_per_rank(schedule, virtual_stages)
    if num_microbatches < 1:
        raise UserError(f"A pipeline step needs at least one microbatch, not {num_microbatches}.")
    schedule_of(schedule).check(schedule, num_ranks, num_microbatches, num)


def pipeline_order(
    schedule: str, *, num_ranks: int, num_microbatches: int, virtual_stages: int = 1
) -> Order:
    """The actions of every pipeline rank in a step. Raises UserError as `check_schedule` does."""
    check_schedule(
        schedule,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        virtual_stages=virtual_stages,
    )
    num, found = stages_per_rank(schedule, virtual_stages), schedule_of(schedule)
    if found.actions:
        return found.actions(num_ranks, num_microbatches, num)
    program = found.program
    assert program
    return tuple(
        tuple(
            action
            for action in with_microbatches(program(rank, num_ranks, num_microbatches, num))
            if action.microbatch < num_microbatches
        )
        for rank in range(num_ranks)
    )
