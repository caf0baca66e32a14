"""Which rank holds which stages, and what each schedule demands of the run.

Two layouts: loop (rank r holds stages r, r + pp, r + 2 pp, ...), and V (rank r holds stages r and
2 pp - 1 - r, so that the first rank has both ends of the model: arXiv:2401.10241 sec. 6).
"""

from __future__ import annotations

from titan_dit.config.section import UserError, show
from titan_dit.schedules.schedule import schedule_of


def stages_per_rank(schedule: str, virtual_stages: int = 1) -> int:
    """Stages that one rank holds: virtual_stages if interleaved, two in a V, else one.

    Raises UserError for a schedule that does not exist or cannot hold `virtual_stages`. A V
    schedule takes 1, the key's default, for "not set".
    """
    found = schedule_of(schedule)
    if virtual_stages < 1:
        raise UserError(f"[pipeline] virtual_stages={virtual_stages} must be at least 1.")
    if found.interleaved:
        return virtual_stages
    if found.v_shaped:
        if virtual_stages not in (1, 2):
            raise UserError(
                f"[pipeline] schedule={show(schedule)} always holds two stages per rank, but "
                f"virtual_stages={virtual_stages}. Leave virtual_stages out, or choose an "
                "interleaved schedule."
            )
        return 2
    if virtual_stages != 1:
        raise UserError(
            f"[pipeline] schedule={show(schedule)} holds one stage per rank, but "
            f'virtual_stages={virtual_stages}. Set schedule="interleaved_1f1b" or virtual_stages=1.'
        )
    return 1


def stages_of_rank(
    schedule: str, rank: int, num_ranks: int, virtual_stages: int = 1
) -> tuple[int, ...]:
    """The stages that pipeline rank `rank` holds, in the order of the model."""
    num = stages_per_rank(schedule, virtual_stages)
    if schedule_of(schedule).v_shaped:
        return rank, 2 * num_ranks - 1 - rank
    return tuple(chunk * num_ranks + rank for chunk in range(num))


def rank_of_stage(schedule: str, stage: int, num_ranks: int) -> int:
    """The pipeline rank that holds `stage`."""
    if schedule_of(schedule).v_shaped:
        return min(stage, 2 * num_ranks - 1 - stage)
    return stage % num_ranks


def check_schedule(
    schedule: str, *, num_ranks: int, num_microbatches: int, virtual_stages: int = 1
) -> None:
    """Raise UserError unless the schedule can run so many microbatches on so many ranks."""
    num = stages_per_rank(schedule, virtual_stages)
    if num_microbatches < 1:
        raise UserError(f"A pipeline step needs microbatches, but there are {num_microbatches}.")
    schedule_of(schedule).check(schedule, num_ranks, num_microbatches, num)
