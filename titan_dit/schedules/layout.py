"""Which rank holds which stages, and what each schedule demands of the run.

Two layouts: loop (rank r holds stages r, r + pp, r + 2 pp, ...), and V (rank r holds stages r and
2 pp - 1 - r, so that the first rank has both ends of the model: arXiv:2401.10241 sec. 6).
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias, get_args

from titan_dit.config.section import UserError, show

Schedule: TypeAlias = Literal[
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "interleaved_zero_bubble",
    "zbv_zero_bubble",
    "dualpipev",
]
SCHEDULES: Final[tuple[Schedule, ...]] = get_args(Schedule)
INTERLEAVED: Final = ("interleaved_1f1b", "interleaved_zero_bubble")
V_SHAPED: Final = ("zbv_zero_bubble", "dualpipev")
SPLIT_BACKWARD: Final = ("interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev")
"""Schedules that take input and weight gradients apart."""


def stages_per_rank(schedule: str, virtual_stages: int = 1) -> int:
    """Stages that one rank holds: virtual_stages if interleaved, two in a V, else one.

    Raises UserError for a schedule that does not exist or cannot hold `virtual_stages`. A V
    schedule takes 1, the key's default, for "not set".
    """
    if schedule not in SCHEDULES:
        choices = ", ".join(show(name) for name in SCHEDULES)
        raise UserError(f"[pipeline] schedule={show(schedule)} is not one of {choices}.")
    if virtual_stages < 1:
        raise UserError(f"[pipeline] virtual_stages={virtual_stages} must be at least 1.")
    if schedule in INTERLEAVED:
        return virtual_stages
    if schedule in V_SHAPED:
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
    if schedule in V_SHAPED:
        return rank, 2 * num_ranks - 1 - rank
    return tuple(chunk * num_ranks + rank for chunk in range(num))


def rank_of_stage(schedule: str, stage: int, num_ranks: int) -> int:
    """The pipeline rank that holds `stage`."""
    if schedule in V_SHAPED:
        return min(stage, 2 * num_ranks - 1 - stage)
    return stage % num_ranks


def round_size(num_ranks: int, num_microbatches: int) -> int:
    """Microbatches that an interleaved rank takes through one stage before it turns to the next.

    `num_ranks` in arXiv:2104.04473 sec. 2.2. It may be more, as long as all rounds are equal, and
    it is less where there are fewer microbatches than ranks.
    """
    return num_microbatches // max(1, num_microbatches // num_ranks)


def rounds_are_equal(num_ranks: int, num_microbatches: int) -> bool:
    """Whether the microbatches fall into equal rounds."""
    return num_microbatches % round_size(num_ranks, num_microbatches) == 0


def check_schedule(
    schedule: str, *, num_ranks: int, num_microbatches: int, virtual_stages: int = 1
) -> None:
    """Raise UserError unless the schedule can run so many microbatches on so many ranks."""
    num = stages_per_rank(schedule, virtual_stages)
    if num_microbatches < 1:
        raise UserError(f"A pipeline step needs microbatches, but there are {num_microbatches}.")
    if schedule == "dualpipev" and num_microbatches < 2 * num_ranks:
        raise UserError(
            f'[pipeline] schedule="dualpipev" on [parallel] pp={num_ranks} needs at least 2 x pp = '
            f"{2 * num_ranks} microbatches, but microbatches={num_microbatches}. Set a smaller "
            "[training] microbatch_size or a larger global_batch_size, or "
            'schedule="zbv_zero_bubble", which takes any number.'
        )
    # With one stage per rank there is nothing to turn to, and any number will do.
    if schedule in INTERLEAVED and num > 1 and not rounds_are_equal(num_ranks, num_microbatches):
        fewer, more = (_nearest(num_ranks, num_microbatches, step) for step in (-1, 1))
        raise UserError(
            f"[pipeline] schedule={show(schedule)} on [parallel] pp={num_ranks} needs microbatches "
            f"in {num_microbatches // num_ranks} equal rounds, but "
            f"microbatches={num_microbatches}. Set [training] microbatch_size or global_batch_size "
            f"so that a rank has {fewer} or {more} of them, or any multiple of pp."
        )


def _nearest(num_ranks: int, num_microbatches: int, step: int) -> int:
    """The next number of microbatches up or down that falls into equal rounds."""
    while not rounds_are_equal(num_ranks, num_microbatches):
        num_microbatches += step
    return num_microbatches
