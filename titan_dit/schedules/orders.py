"""The order of every schedule, by the name it has in [pipeline] schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from titan_dit.schedules import looped, v_shaped
from titan_dit.schedules.action import Order, Programme, number
from titan_dit.schedules.layout import Schedule, check_schedule, stages_per_rank

PROGRAMMES: Final[Mapping[Schedule, Callable[[int, int, int, int], Programme]]] = MappingProxyType(
    {
        "gpipe": looped.gpipe,
        "1f1b": looped.one_forward_one_backward,
        "interleaved_1f1b": looped.interleaved_1f1b,
        "interleaved_zero_bubble": looped.interleaved_zero_bubble,
        "zbv_zero_bubble": v_shaped.zbv_zero_bubble,
        "dualpipev": v_shaped.dualpipev,
    }
)


def pipeline_order(
    schedule: Schedule, *, num_ranks: int, num_microbatches: int, virtual_stages: int = 1
) -> Order:
    """What every pipeline rank computes in a step, and in which order.

    `virtual_stages` is for the interleaved schedules. Raises UserError where the schedule cannot
    run so many microbatches on so many ranks (see `check_schedule`).
    """
    check_schedule(
        schedule,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        virtual_stages=virtual_stages,
    )
    num = stages_per_rank(schedule, virtual_stages)
    programme = PROGRAMMES[schedule]
    return tuple(
        tuple(
            action
            for action in number(programme(rank, num_ranks, num_microbatches, num))
            if action.microbatch < num_microbatches
        )
        for rank in range(num_ranks)
    )
