"""Which runtime performs a planned order: a schedule class of torch's, or titan_dit's own loop.

Both compute the same bits and hold the same tensors. "auto" takes torch's if its class runs the
planned actions and a step lasts as long in NCCL's queues. Both are read from a record of what the
class asks of its stages (schedules/torch_classes.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from titan_dit.config.layout import PipelineConfig
from titan_dit.config.section import UserError, show
from titan_dit.pipeline.nccl_queues import check_messages, makespan, planned_calls, sends_of
from titan_dit.pipeline.schedules.files import ORDER_REMEDY, OrderFile
from titan_dit.pipeline.schedules.schedule import (
    Calls,
    Order,
    num_microbatches_of,
    schedule_of,
)
from titan_dit.pipeline.schedules.simulator import stage_costs

TOLERANCE = 0.02
"""The share of a step that torch's runtime may take longer."""


@dataclass(frozen=True)
class Runtime:
    """The executor of a pipeline's training passes: torch's schedule class or the own loop."""

    line: str
    """Console text: the executor, and why it was chosen."""
    torch: Callable[..., Any] | None = None
    """torch's schedule class, or a function that makes its schedule; None for the own loop."""
    posts: bool = False
    """torch's schedule says when receives are posted, too. Otherwise they are posted as in the own
    loop: torch's classes post most of them when their action is next, and then wait for them."""


class Unfit(ValueError):
    """torch's runtime cannot run this pipeline."""

    def __init__(self, reason: str, fix: str) -> None:
        """`fix`: the advice, a sentence without its dot."""
        super().__init__(f"{reason}. {fix}.")
        self.reason = reason


@lru_cache(maxsize=16)
def choose(
    pipeline: PipelineConfig,
    order: Order,
    stage_ranks: tuple[int, ...],
    file: OrderFile | None,
) -> Runtime:
    """The runtime that [pipeline] `runtime` asks for.

    `order`: the planned actions, of `file` if there is one. `stage_ranks`: the rank of each stage.

    Raises:
        UserError: torch's runtime cannot run this pipeline, but must.
    """
    has_messages = file is not None and file.has_messages
    if pipeline.runtime == "own":
        if has_messages:
            raise UserError(
                f'[pipeline] runtime="own": order={show(pipeline.order)} says when messages are '
                'sent, which only torch\'s runtime does. Set runtime = "torch".'
            )
        return Runtime('own loop (runtime="own")')
    if file and pipeline.runtime == "auto" and not has_messages:
        return Runtime(f"own loop: order={show(pipeline.order)} is a plan for it")
    try:
        schedule, calls = fitting(pipeline, order, stage_ranks, file)
    except Unfit as error:
        if pipeline.runtime == "torch" or has_messages:
            raise UserError(f"[pipeline] runtime={show(pipeline.runtime)}: {error}") from None
        return Runtime(f"own loop: {error.reason}")
    name = name_of(pipeline, schedule, file)
    if has_messages:
        return Runtime(f"{name}, with its messages", schedule, posts=True)
    if pipeline.runtime == "torch":
        return Runtime(f'{name} (runtime="torch")', schedule)
    own, torchs = (
        simulated(each, stage_ranks) for each in (planned_calls(order, stage_ranks), calls)
    )
    assert own
    assert torchs
    if torchs > (1 + TOLERANCE) * own:
        return Runtime(f"own loop: {name} would be {torchs / own - 1:.0%} slower (simulated)")
    return Runtime(f"{name}: within {TOLERANCE:.0%} of the own loop's step (simulated)", schedule)


def name_of(pipeline: PipelineConfig, schedule: Any, file: OrderFile | None) -> str:
    """The runtime in a console line."""
    if file:
        return f"torch's runtime, order={show(pipeline.order)}"
    if ":" in pipeline.schedule:
        return f"schedule={show(pipeline.schedule)}"
    return f"torch's {schedule.__name__}"


def fitting(
    pipeline: PipelineConfig, order: Order, stage_ranks: Sequence[int], file: OrderFile | None
) -> tuple[Callable[..., Any], Calls]:
    """The schedule of torch's for a pipeline, and the calls of a step; raises Unfit."""
    if pipeline.order == "run_time":
        raise Unfit(
            'order="run_time" decides within a step', 'Set order = "planned", or runtime = "auto"'
        )
    where = f"schedule={show(pipeline.schedule)}"
    fix = 'Set runtime = "auto", or another schedule'
    try:
        # Lazy import: the own loop works with a torch whose private parts have changed.
        from titan_dit.pipeline.schedules import torch_classes

        schedule = (
            torch_classes.from_file(file)
            if file
            else torch_classes.torch_class(schedule_of(pipeline.schedule))
        )
    except (ValueError, ImportError) as error:
        raise Unfit(f"{where}: {' '.join(str(error).split())}", fix) from None
    if file:
        where, fix = f"order={show(pipeline.order)}", ORDER_REMEDY.rstrip(".")
    else:
        fix += ", or [training] microbatch_size and global_batch_size for other microbatches"
    try:
        calls = torch_classes.recorded(schedule, tuple(stage_ranks), num_microbatches_of(order))
        check_messages(calls, stage_ranks, receives=bool(file and file.has_messages))
    except Exception as error:
        reason = torch_classes.one_line(error).rstrip(".")
        raise Unfit(f"{where}: {reason}", fix) from error
    if torch_classes.order_of(calls) != order:
        raise Unfit(f"{where}: torch's class runs another order of actions", fix)
    if not (file and file.has_messages):
        calls = planned_calls(order, stage_ranks, sends_of(calls))
    if simulated(calls, stage_ranks) is None:
        raise Unfit(f"{where}: its messages deadlock", fix)
    return schedule, calls


def simulated(calls: Calls, stage_ranks: Sequence[int]) -> float | None:
    """The time of a step with equal stages; None for a deadlock."""
    return makespan(calls, stage_ranks, stage_costs([1.0] * len(stage_ranks)))
