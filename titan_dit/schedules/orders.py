"""The order of every schedule, by the name it has in [pipeline] schedule."""

from __future__ import annotations

from titan_dit.schedules.action import Order, number
from titan_dit.schedules.layout import check_schedule, stages_per_rank
from titan_dit.schedules.schedule import schedule_of


def pipeline_order(
    schedule: str, *, num_ranks: int, num_microbatches: int, virtual_stages: int = 1
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
    program = schedule_of(schedule).program
    return tuple(
        tuple(
            action
            for action in number(program(rank, num_ranks, num_microbatches, num))
            if action.microbatch < num_microbatches
        )
        for rank in range(num_ranks)
    )
