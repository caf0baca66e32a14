"""Whom the timeline of a pipeline accuses, and its cost: `python benchmarks/timeline.py`.

Four gloo ranks run stages that sleep, in planned and in run-time order. In turn one rank sleeps 1.3
times as long, one link delivers a stage's forward late, or nothing is slow. Every run is recorded
and judged by itself. The recorder's cost is the CPU time of steps with it and without.
"""

from __future__ import annotations

import argparse
import itertools
import os
import socket
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from report import finish
from sleeping import Contender, LateTransport, Scenario
from torch.distributed.device_mesh import init_device_mesh

from titan_dit.models.base import Stream
from titan_dit.objectives.base import Prepared
from titan_dit.pipeline import pipelined
from titan_dit.pipeline.events import CAUSE, PipelineEvent, unmarked
from titan_dit.pipeline.pipelined import Planned
from titan_dit.pipeline.recording import PipelineRecording, write_files
from titan_dit.pipeline.schedules.schedule import Action, neighbours, reader_of
from titan_dit.pipeline.timeline import Timeline, suspects

RANKS, SLOW = 4, 1.3
CONTENDERS = (
    Contender("interleaved_zero_bubble", 2, None),
    Contender("interleaved_zero_bubble", 2, 1.0),
)
Edge = tuple[int, int]


class Run(NamedTuple):
    """The slow rank or link of a run."""

    rank: int | None = None
    link: Edge | None = None

    def __str__(self) -> str:
        """Name in the table."""
        if self.rank is not None:
            return f"rank {SLOW:g} x slow"
        return "link a forward late" if self.link else "nothing slow"


class Delays:
    """The seconds that each message is late."""

    of: Mapping[Edge, float] = {}

    @classmethod
    def due(cls, source: int, message: Action, stage_ranks: Sequence[int]) -> float:
        """When a message that leaves now arrives."""
        return time.monotonic() + cls.of.get((source, stage_ranks[reader_of(message)]), 0.0)


def stamped(tensors: Stream, due: float) -> Stream:
    """A message that says when it is due: as fp64 in its first element."""
    first = tensors[0].clone()
    first.view(-1)[0] = due
    return (first, *tensors[1:])


class LinkPlanned(Planned):
    """Planned order over links of which some are late."""

    def send(self, message: Action, tensors: Stream) -> None:
        """Send, with the time when it is due."""
        due = Delays.due(self.p2p.rank, message, self.stage_ranks)
        super().send(message, stamped(tensors, due))

    def take(self, message: Action) -> Stream:
        """Wait for the message, and until it is due."""
        mark, self.mark = self.mark, unmarked
        mark(PipelineEvent.WAITS, CAUSE[message.kind])
        tensors = super().take(message)
        time.sleep(max(0.0, tensors[0].view(-1)[0].item() - time.monotonic()))
        mark(PipelineEvent.ARRIVED, message)
        mark(PipelineEvent.WAITS, None)
        self.mark = mark
        return tensors


class LinkTransport(LateTransport):
    """A transport over links of which some are late."""

    def __init__(self, inner: Any, rank: int, stage_ranks: Sequence[int]) -> None:
        super().__init__(inner.inner)
        self.rank, self.stage_ranks = rank, stage_ranks

    def send(self, message: Action, tensors: Stream) -> None:
        """Send, with the time when it is due."""
        due = Delays.due(self.rank, message, self.stage_ranks)
        self.inner.send(message, stamped(tensors, due))


def runs(repeats: int) -> Iterator[Run]:
    """All runs, kinds in turn; every rank and every link has its turn.

    Not the links between the ranks of the first and the last stage: in the planned order their
    messages have more time than they are late, and delay nobody.
    """
    edges = sorted(neighbours(range(RANKS)))
    for number, edge in zip(range(repeats), itertools.cycle(edges), strict=False):
        yield from (Run(), Run(rank=number % RANKS), Run(link=edge))


class Bench:
    """A contender on one rank."""

    def __init__(self, contender: Contender, mesh: Any, arguments: argparse.Namespace) -> None:
        self.arguments, self.mesh = arguments, mesh
        count = arguments.microbatches
        self.executor: Any = contender.build(mesh, count, arguments.transport)
        self.stage_ranks = self.executor.stage_ranks
        if hasattr(self.executor, "transport"):
            late = self.executor.transport, mesh.get_local_rank(), self.stage_ranks
            self.executor.transport = LinkTransport(*late)
        tokens = torch.zeros(count, 2, 4, dtype=torch.float64)
        self.prepared = Prepared({"tokens": tokens}, {"x": tokens}, torch.ones(count), float(count))
        sizes = [1.0] * len(self.stage_ranks)
        self.recording = PipelineRecording(self.executor, mesh, sizes, takes_part=True)

    def set(self, run: Run) -> None:
        """Make something slow."""
        forward = self.arguments.unit / 2
        even = Scenario("even").seconds(
            len(self.stage_ranks), self.arguments.microbatches, forward, 0
        )
        self.seconds = {
            action: seconds * (SLOW if self.stage_ranks[action.stage] == run.rank else 1.0)
            for action, seconds in even.items()
        }
        Delays.of = {run.link: forward} if run.link else {}

    def step(self) -> None:
        """One step."""
        for stage in self.executor.stages.values():
            stage.part.seconds, stage.part.number, stage.part.weight.grad = self.seconds, 0, None
        dist.barrier()
        self.executor.step(self.prepared)

    def recorded(self, run: Run) -> Timeline | None:
        """The timeline of a run."""
        self.set(run)
        self.recording.begin()
        for number in range(self.arguments.steps):
            self.recording.step(number)
            self.step()
        return self.recording.end()

    def cost(self) -> tuple[float, float]:
        """Median CPU seconds of a step on this rank, without the recorder and with it."""
        self.set(Run())
        spent: dict[bool, list[float]] = {False: [], True: []}
        for number in range(2 * self.arguments.cost_steps):
            is_on = number % 2 == 1
            self.executor.mark = self.recording.recorder.mark if is_on else unmarked
            before = time.process_time()
            self.step()
            spent[is_on].append(time.process_time() - before)
        self.executor.mark = unmarked
        return statistics.median(spent[False]), statistics.median(spent[True])


def verdict(run: Run, timeline: Timeline) -> str:
    """Judgement on the named rank or link: "right", "nobody" (was named) or "wrong"."""
    found = suspects(timeline)
    named = [*found.ranks, *found.links]
    slow = [one for one in run if one is not None]
    if named == slow:
        return "right"
    return "nobody" if not named else "wrong"


def work(rank: int, arguments: argparse.Namespace, port: int, result: str) -> None:
    """Run everything on one rank; rank 0 saves the verdicts."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("pp",))["pp"]
    verdicts, costs = [], []
    with mock.patch.object(pipelined, "Planned", LinkPlanned):
        for contender in CONTENDERS:
            bench = Bench(contender, mesh, arguments)
            bench.recorded(Run())  # The first steps also open connections.
            for number, run in enumerate(runs(arguments.repeats)):
                if timeline := bench.recorded(run):
                    verdicts.append((str(contender), str(run), verdict(run, timeline)))
                    if arguments.keep:
                        write_files(Path(arguments.keep) / f"{contender} {number} {run}", timeline)
            gathered: list[Any] = [None] * RANKS
            dist.all_gather_object(gathered, bench.cost())
            costs.append((str(contender), gathered))
            if hasattr(bench.executor, "transport"):
                bench.executor.transport.close()
    if rank == 0:
        torch.save((verdicts, costs), result)
    dist.barrier()
    dist.destroy_process_group()


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each contender."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        given = arguments, port, f"{folder}/found.pt"
        mp.start_processes(work, args=given, nprocs=RANKS, start_method="spawn")
        verdicts, costs = torch.load(given[-1], weights_only=False)
    counts = Counter(verdicts)
    rows = []
    for name, of_ranks in costs:
        row: dict[str, Any] = {"contender": name}
        for kind in (Run(), Run(rank=0), Run(link=(0, 1))):
            right, total = counts[name, str(kind), "right"], arguments.repeats
            row[f"{kind}: right"] = f"{right} of {total}"
        without, recorded = (statistics.mean(column) for column in zip(*of_ranks, strict=True))
        row["CPU ms per step without"] = round(1e3 * without, 3)
        row["with"] = round(1e3 * recorded, 3)
        rows.append(row)
    return rows


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--unit", type=float, default=0.012, help="seconds of a forward on a rank")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--steps", type=int, default=3, help="steps of each run")
    parser.add_argument("--cost-steps", type=int, default=20)
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--keep", help="folder for the files of every run")
    parser.add_argument("--out", help="JSON file to write")
    return parser.parse_args(arguments)


def main() -> None:
    """Print the table."""
    arguments = parsed()
    rows = measure(arguments)
    finish("timeline", rows, arguments.out, unit_s=arguments.unit, steps=arguments.steps)


if __name__ == "__main__":
    main()
