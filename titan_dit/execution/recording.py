"""Records the timeline of one pipeline of a run: all its ranks record, its first rank writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TypeAlias

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from titan_dit.execution.base import Executor
from titan_dit.execution.pipelined import PipelinedExecutor
from titan_dit.execution.sliced import SlicedExecutor
from titan_dit.observe.recorder import Noted, Recorder
from titan_dit.observe.timeline import (
    RankTimeline,
    Timeline,
    TimelineReader,
    draw_timeline,
    suspects,
    timeline_lines,
    write_costs,
    write_trace,
)
from titan_dit.parallel import clocks
from titan_dit.parallel.clocks import Clock, Offset
from titan_dit.parallel.mesh import AxisSizes, Mesh
from titan_dit.plan import RunPlan
from titan_dit.schedules.action import Order
from titan_dit.schedules.moments import Moment, unmarked
from titan_dit.system.files import write_whole

Written: TypeAlias = Sequence[tuple[str, object, float]]
"""(name of a moment, its subject, time in ns) for each moment, as sent between ranks."""


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
            self.before = clocks.measure(self.mesh.get_group())
            self.recorder.begin()
            self.executor.mark = self.recorder.mark

    def step(self, step: int) -> None:
        """A step of the window begins."""
        if self.takes_part:
            self.recorder.mark(Moment.STEP, step)

    @contextmanager
    def outside(self, name: str) -> Iterator[None]:
        """Mark the block as work outside the pipeline; see `timeline.OUTSIDE`."""
        if self.takes_part:
            self.recorder.mark(Moment.OUTSIDE, name)
        yield
        if self.takes_part:
            self.recorder.mark(Moment.OUTSIDE, None)

    def end(self) -> Timeline | None:
        """End the window; the first rank gets the timeline of all. Collective."""
        self.recorder.mark(Moment.OUTSIDE, None)
        self.executor.mark = unmarked
        noted = [(str(moment), what, at) for moment, what, at in self.recorder.read()]
        group = self.mesh.get_group()
        after = clocks.measure(group)
        everyone: list[Written] = [()] * self.mesh.size()
        dist.all_gather_object(everyone, noted, group=group)
        if self.mesh.get_local_rank() > 0:
            return None
        offsets = zip(self.before, after, strict=True)
        ranks = read_all(everyone, [Clock(*pair) for pair in offsets])
        order = self.executor.order
        stage_ranks = tuple(self.executor.stage_ranks)
        return Timeline(ranks, stage_ranks, self.sizes, order, microbatches_of(order))

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
    origin = next(at for moment, _, at in everyone[0] if moment == Moment.STEP)
    found = []
    for rank, (written, clock) in enumerate(zip(everyone, ranks, strict=True)):
        noted = [Noted(Moment(moment), what, at) for moment, what, at in written]
        found.append(TimelineReader(rank, seconds_since(clock, origin)).read(noted))
    return tuple(found)


def seconds_since(clock: Clock, origin: float) -> Callable[[float], float]:
    """A rank's nanoseconds to seconds since `origin` on the first rank's clock."""
    return lambda at_ns: (clock.to_first(at_ns) - origin) / 1e9


def microbatches_of(order: Order) -> int:
    """Microbatches of a pass."""
    return 1 + max(action.microbatch for actions in order for action in actions)


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


def recording_of(executor: Executor, plan: RunPlan, mesh: Mesh) -> PipelineRecording | None:
    """The recording of a run's first pipeline; None without pp. On every rank."""
    pipelined = executor.inner if isinstance(executor, SlicedExecutor) else executor
    if not isinstance(pipelined, PipelinedExecutor):
        return None
    sizes = [float(len(layers)) for layers in plan.stage_layers]
    sizes[0] += plan.spec.embed_cost
    sizes[-1] += plan.spec.head_cost
    others = [field.name for field in fields(AxisSizes) if field.name != "pp"]
    takes_part = not any(mesh.axis(name).get_local_rank() for name in others)
    count = mesh.sizes.product("samples") * mesh.sizes.model // mesh.sizes.pp
    pipeline = mesh.axis("pp")
    return PipelineRecording(pipelined, pipeline, sizes, takes_part=takes_part, num_pipelines=count)
