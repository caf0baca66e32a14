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
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    _PipelineScheduleRuntime,
)

from titan_dit.config.section import UserError, show
from titan_dit.pipeline.schedules.proof import check
from titan_dit.pipeline.schedules.schedule import KEY, Action, Call, Calls, Kind, Order, Schedule

TorchSchedule: TypeAlias = PipelineScheduleSingle | PipelineScheduleMulti
ScheduleClass: TypeAlias = Callable[..., TorchSchedule]
"""A class of torch's or of a user's; or what makes its schedule, with the same arguments."""


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
        self.driver: Driver = Idle()

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


class Idle:
    """The driver between steps."""

    def run(self, action: Action) -> None:
        """A schedule runs only within `driven`."""
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
            stage.driver = Idle()


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
    # An exception in a step would print the actions of all ranks before it is raised.
    logging.getLogger(torch_schedules.__name__).setLevel(logging.CRITICAL)
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
    # Without targets a schedule would fail; nothing reads them.
    schedule.step(target=torch.zeros(num_microbatches, device="meta"), return_outputs=False)


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
        if isinstance(made, PipelineScheduleMulti) and is_of_torch(schedule):
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


PROBED = 2, 8
"""Pipeline ranks and microbatches with which a user's class is asked for its placement."""


@lru_cache
def schedule_from(name: str, schedule: ScheduleClass) -> Schedule:
    """A user's class as a Schedule; `name`: as in [pipeline] schedule. Raises UserError."""
    num_ranks, num_microbatches = PROBED
    looped = [*range(num_ranks)] * (1 if has_single_stage(schedule) else 2)
    try:
        placed = looped
        if not has_single_stage(schedule):
            stages = [DrivenStage(index, 4, 0, 2) for index in (0, 2)]
            made: Any = make(schedule, stages, num_microbatches)
            assigned = made.stage_index_to_group_rank
            placed = [assigned[stage] for stage in range(len(looped))]
        order = order_of(record(schedule, placed, num_microbatches))
    except Exception as error:
        raise UserError(
            f"{KEY}={show(name)} cannot be built for pp={num_ranks} and {num_microbatches} "
            f"microbatches: {one_line(error)}. Derive it from torch's PipelineScheduleSingle or "
            "PipelineScheduleMulti, whose arguments it takes."
        ) from error
    v_shaped = placed == [0, 1, 1, 0]
    if not v_shaped and placed != looped:
        raise UserError(
            f"{KEY}={show(name)} puts its stages on the ranks {placed}: only loops "
            f"({looped}) and V shapes ([0, 1, 1, 0]) are known. Place them so."
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
        raise UserError(f"{where}: {one_line(error)}") from error


recorded = lru_cache(maxsize=64)(record)
"""`record`, whose results are kept."""


def one_line(error: BaseException) -> str:
    """An error's type and message on one line."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"


def from_file(path: Path, has_messages: bool) -> ScheduleClass:
    """What makes the schedule that runs the order of a file; `has_messages`: it lists them."""

    def made(
        stages: list[DrivenStage], num_microbatches: int, loss_fn: Callable[..., Any]
    ) -> PipelineScheduleMulti:
        make_runtime: Any = _PipelineScheduleRuntime
        runtime: PipelineScheduleMulti = make_runtime(stages, num_microbatches, loss_fn=loss_fn)
        lines = [line for line in path.read_text().splitlines() if line.strip()]
        # torch's reader knows no comments.
        text = "\n".join(line.rstrip(", ") for line in lines if not line.lstrip().startswith("#"))
        with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
            file.write(text + "\n")
            file.flush()
            runtime._load_csv(file.name, format="compute_comms" if has_messages else "compute_only")
        return runtime

    return made
