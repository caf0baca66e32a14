"""The placement of stages on ranks, and the order of every schedule.

Two layouts: loop (rank r holds stages r, r + pp, r + 2 pp, ...), and V (rank r holds stages r and
2 pp - 1 - r: rank 0 has both ends of the model, arXiv:2401.10241 sec. 6).
"""

from __future__ import annotations

from titan_dit.config.section import UserError, show
from titan_dit.schedules.action import Order, number
from titan_dit.schedules.schedule import schedule_of


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
