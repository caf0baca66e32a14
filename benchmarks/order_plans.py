"""Planned orders from measured costs: `python benchmarks/order_plans.py`.

Four gloo ranks run 16 microbatches through stages that sleep. A first step in the schedule's order
is measured, and `pipeline/schedules/planned_order.py` plans from it, as `pipeline plan` does. Then
the schedule's order and the plans take turns, through the same planned loop.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from report import finish
from sleeping import Contender, LatePlanned, Scenario, Seconds, as_they_were, prepare_step
from torch.distributed.device_mesh import init_device_mesh

from titan_dit.objectives.base import Prepared
from titan_dit.pipeline import pipelined
from titan_dit.pipeline.schedules import files, planned_order
from titan_dit.pipeline.schedules.files import MeasuredCosts
from titan_dit.pipeline.schedules.placement import pipeline_order
from titan_dit.pipeline.schedules.schedule import Order, channels
from titan_dit.pipeline.schedules.simulator import simulate

RANKS, STAGES = 4, 8
MEMORIES = (1.0, 1.25, 1.5)
CASES = {
    "even": Scenario("even"),
    "video lengths": Scenario("video lengths", video=True),
    "stage 5 takes 1.6 x as long": Scenario("even"),
    "every link a forward late": Scenario("late links", link=1.0),
    "messages to rank 2 two forwards late": Scenario("late rank", link=2.0),
}


def seconds_of(case: str, unit: float, count: int) -> Seconds:
    """Seconds of every action; `unit`: of a forward on one rank."""
    found = CASES[case].seconds(STAGES, count, unit * RANKS / STAGES, 0)
    size = {5: 1.6} if case.startswith("stage 5") else {}
    return {action: took * size.get(action.stage, 1.0) for action, took in found.items()}


def delay_to(case: str, rank: int, unit: float) -> float:
    """Seconds by which messages to a rank are late."""
    is_late = "rank 2" not in case or rank == 2
    return CASES[case].link * unit * is_late


class Steps:
    """One rank of the pipeline, which runs any order."""

    def __init__(self, schedule: str, arguments: argparse.Namespace) -> None:
        self.mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("pp",))["pp"]
        count = arguments.microbatches
        self.executor = Contender(schedule, 2, None).build(self.mesh, count, "")
        tokens = torch.zeros(count, 2, 4, dtype=torch.float64)
        self.prepared = Prepared({"tokens": tokens}, {"x": tokens}, torch.ones(count), float(count))

    def run(self, order: Order, seconds: Seconds, delay: float) -> Any:
        """A step on all ranks: its seconds, the order as run, and the seconds of every action."""
        self.executor.order = order
        self.executor.channels = channels(order, self.executor.stage_ranks)
        watch = prepare_step(self.executor, seconds, delay)
        dist.barrier()
        start = time.monotonic()
        self.executor.step(self.prepared)
        mine = start, time.monotonic(), watch.ran
        every: list[Any] = [None] * RANKS
        dist.all_gather_object(every, mine)
        step = max(end for _, end, _ in every) - min(start for start, _, _ in every)
        return step, *as_they_were([ran for _, _, ran in every])


def planned(
    costs: MeasuredCosts, order: Order, folder: Path, memory: float
) -> tuple[Order, planned_order.PlannedOrder]:
    """The plan, by the files that a run and `pipeline plan` would write."""
    files.write_costs(folder / "timeline-steps-1-1.costs.json", costs)
    costs = files.read_costs(folder / "timeline-steps-1-1.costs.json")
    ranks, count = costs.stage_ranks, costs.num_microbatches
    took = costs.seconds.__getitem__
    found = planned_order.plan_order(order, ranks, count, took, costs.latency, memory)
    files.write_order(folder / "order.csv", found.order)
    return files.read_order(folder / "order.csv").order, found


def measure_case(case: str, steps: Steps, order: Order, arguments: argparse.Namespace) -> list[Any]:
    """A row for each memory; those of the first rank count."""
    count, unit = arguments.microbatches, arguments.unit
    seconds = seconds_of(case, unit, count)
    delay = delay_to(case, dist.get_rank(), unit)
    step, ran, took = steps.run(order, seconds, delay)
    latencies = {
        pair: delay_to(case, pair[1], unit) for pair in channels(order, steps.executor.stage_ranks)
    }
    ranks = tuple(steps.executor.stage_ranks)
    costs = MeasuredCosts(ranks, count, ran, took, latencies, step)
    with tempfile.TemporaryDirectory() as folder:
        plans = [planned(costs, order, Path(folder), memory) for memory in MEMORIES]
    contenders = [order, *(found for found, _ in plans)]
    spent: list[list[float]] = [[] for _ in contenders]
    errors: list[list[float]] = [[] for _ in contenders]
    for _ in range(arguments.repeats):
        for number, found in enumerate(contenders):
            step, ran, took = steps.run(found, seconds, delay)
            spent[number].append(step)
            expected = simulate(ran, took.__getitem__, latency=costs.latency).makespan
            errors[number].append(step / expected)
    before = statistics.median(spent[0])
    return [
        {
            "case": case,
            "memory": memory,
            "schedule's order, s": round(before, 3),
            "plan, s": round(statistics.median(own), 3),
            "gain, measured": round(before / statistics.median(own), 3),
            "gain, simulated": round(found.gain, 3),
            "plan's step / simulated": round(statistics.median(error), 3),
        }
        for memory, (_, found), own, error in zip(
            MEMORIES, plans, spent[1:], errors[1:], strict=True
        )
    ]


def run(rank: int, arguments: argparse.Namespace, port: int, result: str) -> None:
    """Run every case on one rank; rank 0 saves the rows."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    order = pipeline_order(
        arguments.schedule,
        num_ranks=RANKS,
        num_microbatches=arguments.microbatches,
        virtual_stages=2,
    )
    rows: list[Mapping[str, Any]] = []
    with mock.patch.object(pipelined, "Planned", LatePlanned):
        steps = Steps(arguments.schedule, arguments)
        # The first step opens connections.
        steps.run(order, seconds_of("even", 0.001, arguments.microbatches), 0.0)
        for case in arguments.cases:
            rows += measure_case(case, steps, order, arguments)
    if rank == 0:
        torch.save(rows, result)
    dist.barrier()
    dist.destroy_process_group()


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the cases; a row for each case and memory."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        given = arguments, port, f"{folder}/rows.pt"
        mp.start_processes(run, args=given, nprocs=RANKS, start_method="spawn")
        rows: list[dict[str, Any]] = torch.load(given[-1], weights_only=False)
    return rows


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedule", default="interleaved_zero_bubble")
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--unit", type=float, default=0.04, help="seconds of a forward on one rank")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--out", help="JSON file to write")
    return parser.parse_args(arguments)


def main() -> None:
    """Print the table."""
    arguments = parsed()
    rows = measure(arguments)
    finish("order_plans", rows, arguments.out, unit_s=arguments.unit, repeats=arguments.repeats)


if __name__ == "__main__":
    main()
