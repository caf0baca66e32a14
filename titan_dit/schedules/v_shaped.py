"""Orders in which the stages go down the ranks and back up: ZB-V and DualPipeV.

Each function writes the program of one rank: p ranks, m microbatches. The rank holds stage
`rank` on the way down and stage 2p - 1 - rank on the way up.
"""

from __future__ import annotations

from titan_dit.config.section import UserError, show
from titan_dit.schedules.action import ANY_STAGE, Kind, Program
from titan_dit.schedules.schedule import Schedule

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT  # noqa: E741


def zbv_zero_bubble(rank: int, p: int, m: int, v: int) -> Program:
    """ZB-V (arXiv:2401.10241 sec. 6): no rank is idle between its first and its last action.

    That holds where forward, input and weight gradient take equally long and m >= 2p - 1. A rank
    holds at most 2p microbatches of its two stages, as much as the first rank of 1F1B.

    The pattern needs 2p - 1 microbatches. With fewer it is written for 2p - 1 and the caller drops
    those too many: microbatches do not wait for each other, so what is left is still an order.
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
    """DualPipeV: the way down and the way up overlap (arXiv:2412.19437 sec. 3.2.1, cut in half).

    Follows github.com/deepseek-ai/DualPipe and needs m >= 2p; a rank holds at most 2p + 1
    microbatches of its two stages. Where the original runs a forward and a backward at once, to
    hide the exchange of experts, they stand here one after the other. A DiT has no such exchange,
    and so the forward's output leaves before the backward has run: a step of 4 ranks and 8
    microbatches is idle for 3 of 51 units of time, in pairs for 6 of 54.
    """
    down, up = rank, 2 * p - 1 - rank
    after = p - 1 - rank
    fill = [(F, down)] * (2 * after)
    fill += [(F, down), (F, up)] * (rank + 1)
    fill += [(I, up), (W, ANY_STAGE), (F, up)] * after
    steady = [(F, down), (B, up), (F, up), (B, down)] * (m - 2 * p + rank + 1)
    drain = [(B, up), (F, up), (B, down)] * after
    # The second half of what is left leaves its weight gradients for the end.
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
            'or a larger global_batch_size, or schedule="zbv_zero_bubble", which takes any number.'
        )


ZBV_ZERO_BUBBLE = Schedule(program=zbv_zero_bubble, v_shaped=True, splits_backward=True)
DUALPIPEV = Schedule(
    program=dualpipev, v_shaped=True, splits_backward=True, check=needs_two_per_rank
)
