"""Pipelines of `dynamic.py`: stages that sleep for given times, and links that are late."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from bubble import Nap, mean
from torch import Tensor, nn

from titan_dit.models.base import Stream
from titan_dit.parallel.p2p_groups import P2PGroups
from titan_dit.pipeline.events import PipelineEvent
from titan_dit.pipeline.pipelined import PipelinedExecutor, PipelineParts, Planned
from titan_dit.pipeline.run_time import DecidingExecutor, Decisions, Links
from titan_dit.pipeline.schedules.placement import pipeline_order, rank_of_stage, stages_of_rank
from titan_dit.pipeline.schedules.schedule import Action, Kind, neighbours
from titan_dit.pipeline.stage import Shapes
from titan_dit.pipeline.transports.choice import open_transport

SHAPE = 1, 2, 4
LENGTHS = (0.4, 0.7, 1.0, 1.6, 2.6)
SHARES = (0.2, 0.25, 0.25, 0.2, 0.1)
"""Video clips: lengths, and how many have them. Attention grows with the square."""
Seconds = Mapping[Action, float]


@dataclass(frozen=True)
class Scenario:
    """Deviations of action and link durations from those of an even pipeline."""

    name: str
    sigma: float = 0.0
    """Standard deviation of the log of every duration."""
    late: float = 0.0
    """Share of the actions that take five stage forwards longer."""
    video: bool = False
    """Microbatches of different lengths."""
    link: float = 0.0
    """Delay of every message between ranks, in forwards of a rank."""

    def seconds(self, num_stages: int, num_microbatches: int, forward: float, seed: int) -> Seconds:
        """Seconds of every action; `forward`: those of an even stage's."""
        draws = np.random.default_rng(1000 + seed)
        sizes = np.ones(num_microbatches)
        if self.video:  # Drawn first: contenders with other stages get the same clips.
            clips = draws.choice(LENGTHS, size=num_microbatches, p=SHARES)
            sizes = 0.6 * clips + 0.4 * clips**2
            sizes /= sizes.mean()
        found = {}
        shape = num_stages, num_microbatches
        for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT):
            table = np.full(shape, forward) * sizes
            if self.sigma:
                table *= np.exp(draws.normal(-(self.sigma**2) / 2, self.sigma, shape))
            if self.late:
                table += np.where(draws.random(shape) < self.late, 5 * forward, 0.0)
            found |= {Action(kind, *place): float(one) for place, one in np.ndenumerate(table)}
        return found


SCENARIOS = (
    Scenario("even"),
    Scenario("jitter", sigma=0.3),
    Scenario("late actions", late=0.03),
    Scenario("video lengths", video=True),
    Scenario("late links", link=1.0),
)


class SleepingStage(nn.Module):
    """A stage with one weight that sleeps for given times."""

    tied: Mapping[str, str] = MappingProxyType({})
    embed = head = None
    seconds: Seconds
    """Seconds of every action; set before each step."""

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__()
        self.stage, self.is_last = stage, stage == num_stages - 1
        self.weight = nn.Parameter(torch.ones(SHAPE[-1], dtype=torch.float64))
        self.number = 0
        """The next microbatch."""

    def forward(self, given: Any, side_inputs: Mapping[str, Tensor]) -> Any:
        """Sleep; map tokens (first stage) or a stream to a stream, or the loss's input."""
        forward, input_, weight = (
            self.seconds[Action(kind, self.stage, self.number)]
            for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
        )
        self.number += 1
        time.sleep(forward)
        if self.stage == 0:  # It has no input gradient: that time goes to the weight gradient.
            out = given["tokens"] + Nap.apply(self.weight, weight + input_)
        else:
            out = Nap.apply(given[0], input_) + Nap.apply(self.weight, weight)
        return out if self.is_last else (out,)


class Watch:
    """A `Mark` that keeps what a rank ran, and for how long."""

    def __init__(self) -> None:
        self.ran: dict[Action, float] = {}

    def __call__(self, moment: PipelineEvent, what: Any) -> None:
        """Time an action."""
        if moment is PipelineEvent.BEGINS:
            self.ran[what] = -time.monotonic()
        elif moment is PipelineEvent.ENDS:
            self.ran[what] += time.monotonic()


def stamped(tensors: Stream) -> Stream:
    """A message that says when it was sent: as fp64 in its first element."""
    first = tensors[0].clone()
    first.view(-1)[0] = time.monotonic()
    return (first, *tensors[1:])


class LatePlanned(Planned):
    """Planned order over links that deliver a message `delay` seconds after it was sent."""

    delay = 0.0

    def send(self, message: Action, tensors: Stream) -> None:
        """Send, with the time."""
        super().send(message, stamped(tensors))

    def take(self, message: Action) -> Stream:
        """Wait for the message, and until it is due."""
        tensors = super().take(message)
        time.sleep(max(0.0, tensors[0].view(-1)[0].item() + self.delay - time.monotonic()))
        return tensors


class LateTransport:
    """A transport over links that deliver a message `delay` seconds after it was sent."""

    delay = 0.0

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.travelling: dict[Action, tuple[float, Stream]] = {}
        """Messages that are on this host already: when they are due."""
        self.here: dict[Action, Stream] = {}

    def __getattr__(self, name: str) -> Any:
        """Everything else is the transport's own."""
        return getattr(self.inner, name)

    def send(self, message: Action, tensors: Stream) -> None:
        """Send, with the time."""
        self.inner.send(message, stamped(tensors))

    def arrived(self) -> list[Action]:
        """The messages that are due."""
        for message in self.inner.arrived():
            tensors = self.inner.take(message)
            self.travelling[message] = tensors[0].view(-1)[0].item() + self.delay, tensors
        now = time.monotonic()
        due = [message for message, (at, _) in self.travelling.items() if at <= now]
        for message in due:
            self.here[message] = self.travelling.pop(message)[1]
        return due

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for a message, or until one is due."""
        if self.travelling:
            left = min(at for at, _ in self.travelling.values()) - time.monotonic()
            timeout_s = max(0.0, left if timeout_s is None else min(left, timeout_s))
        self.inner.wait(timeout_s)

    def take(self, message: Action) -> Stream:
        """A message that was due."""
        return self.here.pop(message)


@dataclass(frozen=True)
class Contender:
    """A way to run a pipeline."""

    schedule: str
    virtual_stages: int
    memory: float | None
    """None: in planned order."""

    def __str__(self) -> str:
        """Name in the tables."""
        how = "planned" if self.memory is None else f"run_time, memory {self.memory:g}"
        return f"{self.schedule}, {how}"

    def order(self, num_ranks: int, num_microbatches: int) -> Any:
        """The planned order."""
        return pipeline_order(
            self.schedule,
            num_ranks=num_ranks,
            num_microbatches=num_microbatches,
            virtual_stages=self.virtual_stages,
        )

    def build(self, mesh: Any, num_microbatches: int, transport: Any) -> PipelinedExecutor:
        """The executor of one rank."""
        rank, num_ranks = mesh.get_local_rank(), mesh.size()
        stages = stages_of_rank(self.schedule, rank, num_ranks, self.virtual_stages)
        num_stages = num_ranks * len(stages)
        parts = {stage: SleepingStage(stage, num_stages) for stage in stages}
        ranks = [rank_of_stage(self.schedule, stage, num_ranks) for stage in range(num_stages)]
        links = P2PGroups(mesh)
        links.open(neighbours(ranks))
        stream = (torch.empty(SHAPE, device="meta", dtype=torch.float64, requires_grad=True),)
        shapes = Shapes(
            stream=stream,
            predictions=stream,
            losses=torch.empty(SHAPE[:2], device="meta"),
        )
        order = self.order(num_ranks, num_microbatches)
        device = torch.device("cpu")
        given = PipelineParts(
            parts=parts,
            p2p=links,
            order=order,
            stage_ranks=ranks,
            shapes=shapes,
            loss=mean,
            microbatch_size=1,
            device=device,
            dtype=torch.float64,
        )
        if self.memory is None:
            return PipelinedExecutor(given)
        opened, _ = open_transport(links, ranks, stream, device, transport, "")
        alone = Decisions([torch.distributed.get_rank()])
        late: Any = LateTransport(opened)
        return DecidingExecutor(given, memory=self.memory, links=Links(late, "", alone))


def prepare_step(executor: PipelinedExecutor, seconds: Seconds, delay: float) -> Watch:
    """Set the durations of the next step; what it runs is in the `Watch` afterwards."""
    for stage in executor.stages.values():
        part: Any = stage.part
        part.seconds, part.number, part.weight.grad = seconds, 0, None
    LatePlanned.delay = LateTransport.delay = delay
    executor.mark = watch = Watch()
    return watch


def as_they_were(rans: Sequence[Mapping[Action, float]]) -> tuple[Any, dict[Action, float]]:
    """The actions that every rank ran, in sequence, and the seconds of each."""
    order = tuple(tuple(ran) for ran in rans)
    return order, {action: took for ran in rans for action, took in ran.items()}
