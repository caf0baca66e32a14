"""V-shaped schedules, whose stages go down the ranks and back up: ZB-V and DualPipeV.

Each function returns one rank's program: p ranks, m microbatches, the stages `rank` (down) and
2p - 1 - rank (up).
"""

from __future__ import annotations

from titan_dit.config.section import UserError, show
from titan_dit.pipeline.schedules.schedule import ANY_STAGE, Kind, Program, Schedule

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT  # noqa: E741


def zbv_zero_bubble(rank: int, p: int, m: int, v: int) -> Program:
    """ZB-V (arXiv:2401.10241 sec. 6): no rank is idle between its first and its last action.

    This assumes that F, I and W take equally long and m >= 2p - 1. A rank holds at most 2p
    microbatches of its two half-size stages, as much as rank 0 of 1F1B. For a smaller m the program
    has 2p - 1 microbatches. The caller drops those beyond m: microbatches are independent.
    """
    m = max(m, 2 * p - 1)
    down, up = rank, 2 * p - 1 - rank
    fill = [(F, down)] * (2 * (p - rank) - 1)
    fill += [(F, up), (F, down)] * rank
    fill += [(F, up), (I, up), (W, up)] * (p - rank)
    through = [(I, down), (W, down), (F, up), (I, up), (W, up)]
    fed = m - (2 * p - 1 - rank)
    steady = [(F, down), *through] * fed + through * (m - p - fed)
    drain = [(I, down), (I, up)] * rank
    drain += [(I, down), (W, down)] * (p - rank)
    return fill + steady + drain + [(W, up)] * rank + [(W, down)] * rank


def dualpipev(rank: int, p: int, m: int, v: int) -> Program:
    """DualPipeV: one half of DualPipe (arXiv:2412.19437 sec. 3.2.1), for m >= 2p.

    Follows github.com/deepseek-ai/DualPipe. A rank holds at most 2p + 1 microbatches of its two
    stages. The original overlaps a forward and a backward to hide the all-to-all of experts. A DiT
    has none, so the two run one after the other and the forward's output is sent earlier: with 4
    ranks and 8 microbatches the bubble is 3 of 51 time units instead of 6 of 54.
    """
    down, up = rank, 2 * p - 1 - rank
    after = p - 1 - rank
    fill = [(F, down)] * (2 * after)
    fill += [(F, down), (F, up)] * (rank + 1)
    fill += [(I, up), (W, ANY_STAGE), (F, up)] * after
    steady = [(F, down), (B, up), (F, up), (B, down)] * (m - 2 * p + rank + 1)
    drain = [(B, up), (F, up), (B, down)] * after
    # The second half of the drain delays its weight gradients.
    drain += [(B, up), (B, down)] * ((rank + 1) // 2)
    if rank % 2 == 0:
        drain += [(B, up), (I, down)]
    drain += [(I, up), (I, down)] * ((rank + 1) // 2)
    drain += [(W, ANY_STAGE), (I, down)] * after
    return fill + steady + drain + [(W, ANY_STAGE)] * (rank + 1)


def needs_two_per_rank(name: str, p: int, m: int, v: int) -> None:
    """Raise UserError for fewer than 2p microbatches."""
    if m < 2 * p:
        raise UserError(
            f"[pipeline] schedule={show(name)} on [parallel] pp={p} needs at least 2 x pp = "
            f"{2 * p} microbatches, but microbatches={m}. Set a smaller [training] microbatch_size "
            'or a larger global_batch_size, or schedule="zbv_zero_bubble", which accepts any.'
        )


ZBV_ZERO_BUBBLE = Schedule(
    program=zbv_zero_bubble, torch="ZBVZeroBubble", v_shaped=True, splits_backward=True
)
DUALPIPEV = Schedule(
    program=dualpipev,
    torch="DualPipeV",
    v_shaped=True,
    splits_backward=True,
    check=needs_two_per_rank,
)
