"""The schedule classes of torch.distributed.pipelining, and how they drive a stage.

A class of torch's decides when a rank runs which action, posts which receive and sends which
output: `step()` calls methods of the rank's stages. `DrivenStage` turns these calls into calls of a
`Driver`. One driver records them, without devices or a process group: from the record follow the
order of a user's own class, its placement, and when its messages are posted. The other one
(pipeline/torch_runtime.py) performs them.

Only this file imports torch.distributed.pipelining.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
)

from titan_dit.config.section import UserError, show
from titan_dit.pipeline.schedules.files import OrderFile
from titan_dit.pipeline.schedules.proof import check
from titan_dit.pipeline.schedules.schedule import KEY, Action, Call, Calls, Kind, Order, Schedule

TorchSchedule: TypeAlias = PipelineScheduleSingle | PipelineScheduleMulti
ScheduleClass: TypeAlias = Callable[..., TorchSchedule]
"""A schedule class of torch's or of a user's, or a function of the same arguments."""


class Driver(Protocol):
    """Performs what a schedule asks of the stages of a rank."""

    def run(self, action: Action) -> None:
        """Compute an action."""

    def receive(self, message: Action) -> None:
        """Post the receive of a message of another rank."""

    def send(self, message: Action) -> None:
        """Send an output to another rank."""


class DrivenStage(PipelineStage):
    """A stage of this rank, as torch's schedules call it.

    torch's own methods are not used. Their split backward adds the gradients of microbatches in the
    compute dtype, and until torch 2.14 they hold a receive buffer for every microbatch of a step
    (docs/pipelines.md). Messages are not returned to torch as operations: the driver posts them in
    a group for each pair of ranks and direction.
    """

    def __init__(
        self,
        index: int,
        num_stages: int,
        rank: int,
        num_ranks: int,
        part: nn.Module | None = None,
    ) -> None:
        """`part`: the stage's module, which some classes look at."""
        # PipelineStage.__init__ needs a process group. These are the attributes that schedules
        # read. torch shards and gathers no module within a list: the driver does.
        self.submod = nn.ModuleList([part or nn.Identity()])
        self.stage_index, self.num_stages = index, num_stages
        self.group_rank, self.group_size = rank, num_ranks
        self.group, self.device = None, torch.device("cpu")
        self.stage_index_to_group_rank: dict[int, int] = {}
        self.has_backward = True
        self.output_chunks: list[Any] = []
        self.driver: Driver = NoDriver()

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> None:
        """Forward of a microbatch."""
        self.driver.run(Action(Kind.FORWARD, self.stage_index, fwd_chunk_id))

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Full backward of a microbatch, or its input half."""
        kind = Kind.BACKWARD if full_backward else Kind.BACKWARD_INPUT
        self.driver.run(Action(kind, self.stage_index, bwd_chunk_id))

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Weight half of a backward."""
        self.driver.run(Action(Kind.BACKWARD_WEIGHT, self.stage_index, bwd_chunk_id))

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Post the receive of a microbatch's input."""
        if not self.is_first:
            self.driver.receive(Action(Kind.FORWARD, self.stage_index - 1, fwd_chunk_id))
        return []

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Post the receive of the gradient of a microbatch's output."""
        if not self.is_last:
            self.driver.receive(Action(Kind.BACKWARD_INPUT, self.stage_index + 1, bwd_chunk_id))
        return []

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Send a microbatch's output."""
        if not self.is_last:
            self.driver.send(Action(Kind.FORWARD, self.stage_index, fwd_chunk_id))
        return []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Send the gradient of a microbatch's input."""
        if not self.is_first:
            self.driver.send(Action(Kind.BACKWARD_INPUT, self.stage_index, bwd_chunk_id))
        return []

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Nothing: the driver hands outputs to other stages of the rank."""

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Nothing, likewise."""

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """Nothing, likewise."""

    def release_fwd_send_outputs(self, fwd_chunk_id: int) -> None:
        """Nothing: the driver holds outputs until they are sent. New in torch 2.15."""

    def clear_runtime_states(self) -> None:
        """Nothing: a driver lives for one step."""

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Nothing: the driver reduces them after the last backward of the stage."""

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Nothing: losses are shares of the step's loss already."""


class Recorder:
    """The driver that notes what a schedule asks for."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def run(self, action: Action) -> None:
        """See `Driver.run`."""
        self.calls.append(Call("run", action))

    def receive(self, message: Action) -> None:
        """See `Driver.receive`."""
        self.calls.append(Call("receive", message))

    def send(self, message: Action) -> None:
        """See `Driver.send`."""
        self.calls.append(Call("send", message))


class NoDriver:
    """The driver between steps."""

    def run(self, action: Action) -> None:
        """Raise AssertionError: a schedule runs only within `driven`."""
        raise AssertionError(f"{action} outside of a step")

    receive = send = run


@contextmanager
def driven(stages: Iterable[DrivenStage], driver: Driver) -> Iterator[None]:
    """Let a driver perform what is asked of these stages within the block."""
    for stage in stages:
        stage.driver = driver
    try:
        yield
    finally:  # A driver holds the microbatches of its step.
        for stage in stages:
            stage.driver = NoDriver()


def is_torch_class(thing: object) -> bool:
    """True for a schedule class of torch's or one derived from it."""
    return isinstance(thing, type) and issubclass(
        thing, PipelineScheduleSingle | PipelineScheduleMulti
    )


def has_single_stage(schedule: ScheduleClass) -> bool:
    """True for a class with one stage per rank."""
    return isinstance(schedule, type) and issubclass(schedule, PipelineScheduleSingle)


def make(
    schedule: ScheduleClass, stages: Sequence[DrivenStage], num_microbatches: int
) -> TorchSchedule:
    """The schedule of a rank with these stages."""
    held = stages[0] if has_single_stage(schedule) else list(stages)
    made = schedule(held, num_microbatches, loss_fn=lambda output, target: output)
    # torch would infer shapes and connect the ranks in the first step: the driver does both.
    ready: Any = made
    if isinstance(made, PipelineScheduleSingle):
        ready._stage_forward_initialized = ready._stage_backward_initialized = True
    else:
        ready._stages_forward_initialized = ready._stages_backward_initialized = True
    return made


def step(schedule: TorchSchedule, num_microbatches: int) -> None:
    """One training step of a schedule, which the drivers of its stages perform."""
    log = logging.getLogger(torch_schedules.__name__)
    level = log.level
    # An exception would print the actions of all ranks before it is raised.
    log.setLevel(logging.CRITICAL)
    try:
        # Without targets a schedule would fail; nothing reads them.
        schedule.step(target=torch.zeros(num_microbatches, device="meta"), return_outputs=False)
    finally:
        log.setLevel(level)


def record(schedule: ScheduleClass, stage_ranks: Sequence[int], num_microbatches: int) -> Calls:
    """The calls of every rank in a step; `stage_ranks`: the rank of each stage.

    Raises what the class raises for sizes that it does not support.
    """
    found = []
    num_ranks, made = max(stage_ranks) + 1, None
    for rank in range(num_ranks):
        stages = [
            DrivenStage(index, len(stage_ranks), rank, num_ranks)
            for index, place in enumerate(stage_ranks)
            if place == rank
        ]
        # torch's classes compute the actions of all ranks at once, in seconds for large pipelines.
        if isinstance(made, PipelineScheduleMulti) and is_of_torch(type(made)):
            made._stages, made.rank = list(stages), rank
        else:
            made = make(schedule, stages, num_microbatches)
        recorder = Recorder()
        with torch.enable_grad(), driven(stages, recorder):
            step(made, num_microbatches)
        found.append(tuple(recorder.calls))
    return tuple(found)


def is_of_torch(schedule: ScheduleClass) -> bool:
    """True for a class that torch defines."""
    return schedule.__module__.startswith("torch.")


def order_of(calls: Calls) -> Order:
    """The actions of every rank."""
    return tuple(tuple(call.action for call in line if call.what == "run") for line in calls)


def torch_class(schedule: Schedule) -> ScheduleClass:
    """The class of torch's with a schedule's order; ValueError if this torch has none."""
    if schedule.torch is None:
        raise ValueError("torch has no class for it")
    if not isinstance(schedule.torch, str):
        return schedule.torch
    try:
        found: ScheduleClass = torch_schedules.get_schedule_class(schedule.torch)
    except ValueError:
        raise ValueError(f"torch {torch.__version__} has no Schedule{schedule.torch}") from None
    return found


PROBED = (2, 8, 2), (4, 16, 2), (2, 12, 3), (4, 16, 4)
"""Pipeline ranks, microbatches and stages of a rank with which a user's class is asked for its
placement: the first ones that it accepts."""


@lru_cache
def schedule_from(name: str, schedule: ScheduleClass) -> Schedule:
    """A user's class as a Schedule; `name`: as in [pipeline] schedule. Raises UserError."""
    refused = ""
    for sizes in PROBED:
        try:
            placed, order = probed(schedule, *sizes)
        except Exception as error:
            p, m, _ = sizes
            refused = refused or f"pp={p} and {m} microbatches: {one_line(error)}"
        else:
            return of_class(name, schedule, placed, order)
    raise UserError(
        f"{KEY}={show(name)} cannot be built for {refused}. It must take the arguments of torch's "
        "PipelineScheduleSingle or PipelineScheduleMulti, and use no outputs, losses or operations "
        "of its stages."
    )


def probed(
    schedule: ScheduleClass, num_ranks: int, num_microbatches: int, per_rank: int
) -> tuple[list[int], Order]:
    """The rank of each stage, and the order, of a user's class with these sizes."""
    placed = [*range(num_ranks)] * (1 if has_single_stage(schedule) else per_rank)
    if not has_single_stage(schedule):
        own = range(0, len(placed), num_ranks)
        stages = [DrivenStage(index, len(placed), 0, num_ranks) for index in own]
        made: Any = make(schedule, stages, num_microbatches)
        assigned = made.stage_index_to_group_rank
        placed = [assigned[stage] for stage in range(len(placed))]
    return placed, order_of(record(schedule, placed, num_microbatches))


def of_class(name: str, schedule: ScheduleClass, placed: list[int], order: Order) -> Schedule:
    """The Schedule of a class with this placement and order. Raises UserError."""
    ranks = [*range(max(placed) + 1)]
    looped = ranks * (len(placed) // len(ranks))
    shaped = [*ranks, *reversed(ranks)]
    v_shaped = placed == shaped
    if not v_shaped and placed != looped:
        raise UserError(
            f"{KEY}={show(name)} puts its stages on the ranks {placed}: only loops ({looped}) and "
            f"V shapes ({shaped}) are known. Place them so."
        )

    def actions(p: int, m: int, v: int) -> Order:
        ranks = [*range(p), *reversed(range(p))] if v_shaped else [*range(p)] * v
        return order_of(recorded(schedule, tuple(ranks), m))

    return Schedule(
        actions=actions,
        torch=schedule,
        v_shaped=v_shaped,
        interleaved=not v_shaped and not has_single_stage(schedule),
        splits_backward=any(a.kind is Kind.BACKWARD_INPUT for rank in order for a in rank),
        check=partial(accepts, actions),
    )


def accepts(actions: Callable[[int, int, int], Order], name: str, p: int, m: int, v: int) -> None:
    """Raise UserError unless a user's class runs every microbatch once, without a deadlock."""
    where = f"{KEY}={show(name)} on [parallel] pp={p} with {m} microbatches"
    try:
        order = actions(p, m, v)
        check(order, num_stages=p * v, num_microbatches=m, in_sequence=False)
    except Exception as error:
        raise UserError(
            f"{where}: {one_line(error).rstrip('.')}. Set [training] microbatch_size or "
            "global_batch_size for other microbatches, or another schedule."
        ) from error


recorded = lru_cache(maxsize=64)(record)
"""`record`, whose results are kept."""


def one_line(error: BaseException) -> str:
    """An error's type and message on one line, cut: torch's may hold a whole schedule."""
    text = " ".join(str(error).split())
    text = text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"


LONGEST = 200
"""Characters of an error of torch's or of a user's class."""


@lru_cache(maxsize=8)
def from_file(file: OrderFile) -> ScheduleClass:
    """Return a function that makes torch's schedule of a file's order.

    With its messages, if the file has them.
    """
    rows = file.cells
    if file.has_messages and hasattr(torch_schedules, "WAIT_SEND_F"):  # New in torch 2.15.
        sends = ([cell for cell in row if "SEND" in cell] for row in rows)
        waits = ([cell.replace("SEND", "WAIT_SEND") for cell in row] for row in sends)
        rows = tuple((*row, *late) for row, late in zip(rows, waits, strict=True))

    def made(
        stages: list[DrivenStage], num_microbatches: int, loss_fn: Callable[..., Any]
    ) -> PipelineScheduleMulti:
        make_runtime: Any = torch_schedules._PipelineScheduleRuntime
        runtime: PipelineScheduleMulti = make_runtime(stages, num_microbatches, loss_fn=loss_fn)
        with tempfile.NamedTemporaryFile("w", suffix=".csv", encoding="utf-8") as written:
            written.write("\n".join(",".join(row) for row in rows) + "\n")
            written.flush()
            runtime._load_csv(
                written.name, format="compute_comms" if file.has_messages else "compute_only"
            )
        return runtime

    return made
