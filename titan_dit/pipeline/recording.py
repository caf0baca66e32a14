"""Records the timeline of one pipeline: all its ranks record, its first rank writes.

The clocks of the ranks are compared by ping-pong with the first rank. The fastest of many round
trips counts. Clocks drift, so an offset is measured twice and interpolated linearly in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from titan_dit.pipeline.events import Noted, PipelineEvent, Recorder, unmarked
from titan_dit.pipeline.pipelined import PipelinedExecutor
from titan_dit.pipeline.schedules.schedule import num_microbatches_of
from titan_dit.pipeline.timeline import (
    RankTimeline,
    Timeline,
    TimelineReader,
    draw_timeline,
    suspects,
    timeline_lines,
    write_costs,
    write_trace,
)
from titan_dit.system.files import write_whole

ROUNDS = 32
"""Round trips of each rank; the first ones also connect the two ends."""
TAG = 1_000_003
"""Tag of these messages, in a group that others may use."""


class Offset(NamedTuple):
    """A rank's clock minus the first rank's, in nanoseconds."""

    at_ns: float
    """Time of the measurement, on the first rank's clock."""
    offset_ns: float
    round_trip_ns: float
    """The error is at most half of it."""


@dataclass(frozen=True)
class Clock:
    """A rank's clock, relative to the first rank's."""

    before: Offset
    after: Offset

    def to_first(self, own_ns: float) -> float:
        """A time of this rank, on the first rank's clock."""
        (first, offset, _), (last, later, _) = self.before, self.after
        if last <= first:
            return own_ns - offset
        drift = (later - offset) / (last - first)
        # own = reference + offset + drift * (reference - first), solved for the reference.
        return first + (own_ns - offset - first) / (1 + drift)


NO_OFFSET = Offset(0.0, 0.0, 0.0)


def fastest(trips: Sequence[tuple[int, int, int]]) -> Offset:
    """The clock offset in ns from the round trip with the least delay, taken at its middle.

    `trips`: (sent, answered on the other clock, received).
    """
    sent, answered, received = min(trips, key=lambda trip: trip[2] - trip[0])
    middle = (sent + received) / 2
    return Offset(middle, answered - middle, received - sent)


def measure(
    group: dist.ProcessGroup, now: Callable[[], int] = time.perf_counter_ns
) -> list[Offset]:
    """The offsets of all ranks of a group, in group order; [] on ranks but the first. Collective.

    `now`: this rank's clock, in nanoseconds. The group needs a backend for CPU tensors.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    value = torch.zeros(1, dtype=torch.int64)
    if rank > 0:
        answer(group, value, now)
        return []
    found = [NO_OFFSET._replace(at_ns=float(now()))]
    for other in range(1, size):
        peer = dist.get_global_rank(group, other)
        trips = []
        for _ in range(ROUNDS):
            sent = now()
            dist.send(value, peer, group, TAG)
            dist.recv(value, peer, group, TAG)
            trips.append((sent, int(value), now()))
        found.append(fastest(trips))
    return found


def answer(group: dist.ProcessGroup, value: torch.Tensor, now: Callable[[], int]) -> None:
    """Answer every message of the first rank with this rank's time."""
    first = dist.get_global_rank(group, 0)
    for _ in range(ROUNDS):
        dist.recv(value, first, group, TAG)
        value.fill_(now())
        dist.send(value, first, group, TAG)


Written: TypeAlias = Sequence[tuple[str, object, float]]
"""(name of an event, its subject, time in ns) for each event, as sent between ranks."""


class PipelineRecording:
    """The recording of this rank's pipeline; of several pipelines only one is recorded.

    `begin` and `write` are collective over the ranks of the pipeline, on the CPU.
    """

    def __init__(
        self,
        executor: PipelinedExecutor,
        mesh: DeviceMesh,
        sizes: Sequence[float],
        *,
        takes_part: bool,
        num_pipelines: int = 1,
    ) -> None:
        """`sizes`: the expected costs of the stages, in layers. `mesh`: the pipeline's ranks."""
        self.num_pipelines = num_pipelines
        self.executor, self.mesh, self.sizes = executor, mesh, tuple(sizes)
        self.takes_part = takes_part
        self.recorder = Recorder(executor.device)
        self.before: list[Offset] = []

    def begin(self) -> None:
        """Begin a window; an unwritten one is discarded."""
        if self.takes_part:
            self.before = measure(self.mesh.get_group())
            self.recorder.begin()
            self.executor.mark = self.recorder.mark

    def step(self, step: int) -> None:
        """A step of the window begins."""
        if self.takes_part:
            self.recorder.mark(PipelineEvent.STEP, step)

    @contextmanager
    def outside(self, name: str) -> Iterator[None]:
        """Mark the block as work outside the pipeline; see `timeline.OUTSIDE`."""
        if self.takes_part:
            self.recorder.mark(PipelineEvent.OUTSIDE, name)
        yield
        if self.takes_part:
            self.recorder.mark(PipelineEvent.OUTSIDE, None)

    def end(self) -> Timeline | None:
        """End the window; the first rank gets the timeline of all. Collective."""
        self.recorder.mark(PipelineEvent.OUTSIDE, None)
        self.executor.mark = unmarked
        noted = [(str(event), what, at) for event, what, at in self.recorder.read()]
        group = self.mesh.get_group()
        after = measure(group)
        everyone: list[Written] = [()] * self.mesh.size()
        dist.all_gather_object(everyone, noted, group=group)
        if self.mesh.get_local_rank() > 0:
            return None
        offsets = zip(self.before, after, strict=True)
        ranks = read_all(everyone, [Clock(*pair) for pair in offsets])
        order = self.executor.order
        stage_ranks = tuple(self.executor.stage_ranks)
        return Timeline(ranks, stage_ranks, self.sizes, order, num_microbatches_of(order))

    def write(self, folder: Path, note: str = "") -> list[str]:
        """End the window, write its files and return the console lines, on the first rank.

        `note`: an additional line of the text file. Collective.
        """
        timeline = self.end() if self.takes_part else None
        others = f"of {self.num_pipelines} pipelines only the first is recorded"
        notes = [*([note] if note else []), *([others] if self.num_pipelines > 1 else [])]
        return write_files(folder, timeline, notes) if timeline else []


def read_all(everyone: Sequence[Written], ranks: Sequence[Clock]) -> tuple[RankTimeline, ...]:
    """The timelines of all ranks on the first rank's clock, from its first step on."""
    origin = next(at for event, _, at in everyone[0] if event == PipelineEvent.STEP)
    found = []
    for rank, (written, clock) in enumerate(zip(everyone, ranks, strict=True)):
        noted = [Noted(PipelineEvent(event), what, at) for event, what, at in written]
        found.append(TimelineReader(rank, seconds_since(clock, origin)).read(noted))
    return tuple(found)


def seconds_since(clock: Clock, origin: float) -> Callable[[float], float]:
    """A rank's nanoseconds to seconds since `origin` on the first rank's clock."""
    return lambda at_ns: (clock.to_first(at_ns) - origin) / 1e9


def write_files(folder: Path, timeline: Timeline, notes: Sequence[str] = ()) -> list[str]:
    """Write the trace, the picture, the text and the costs; return the console lines."""
    if not timeline.num_passes:
        return ["no pipeline timeline: no step of its window has ended"]
    folder.mkdir(parents=True, exist_ok=True)
    name = f"timeline-steps-{timeline.first_step}-{timeline.last_step}"
    blamed = suspects(timeline)
    lines = [*timeline_lines(timeline, blamed), *notes]
    write_trace(folder / f"{name}.json.gz", timeline)
    draw_timeline(folder / f"{name}.png", timeline, blamed)
    write_whole(folder / f"{name}.txt", "\n".join(lines) + "\n")
    write_costs(folder / f"{name}.costs.json", timeline)
    return [*lines, f"pipeline timeline in {folder / name}.json.gz"]
