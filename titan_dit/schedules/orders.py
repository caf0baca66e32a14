"""The order of a pipeline schedule, by its [pipeline] schedule name."""

from __future__ import annotations

from titan_dit.schedules.action import Order, number
from titan_dit.schedules.layout import check_schedule, stages_per_rank
from titan_dit.schedules.schedule import schedule_of


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
