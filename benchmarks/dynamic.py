"""Run-time order against planned order: `python benchmarks/dynamic.py`.

Four gloo ranks run 16 microbatches through stages that sleep. All contenders take turns in one run,
through the same loop, with the same seconds for each action. Every step is also simulated from its
actions as they were.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from report import finish
from sleeping import SCENARIOS, Contender, LatePlanned, Scenario, as_they_were, prepare_step
from torch.distributed.device_mesh import init_device_mesh

from titan_dit.objectives.base import Prepared
from titan_dit.pipeline import pipelined
from titan_dit.pipeline.schedules.simulator import simulate

RANKS = 4
ONE_F_ONE_B = Contender("1f1b", 1, None)
SCHEDULES = ("interleaved_zero_bubble", "interleaved_1f1b")
CONTENDERS = [ONE_F_ONE_B] + [
    Contender(schedule, 2, memory) for schedule in SCHEDULES for memory in (None, 1.0, 1.5)
]
GOALS = {
    ("interleaved_zero_bubble", 1.0): (0.98, 1.02, 1.02, 1.07, 1.12),
    ("interleaved_zero_bubble", 1.5): (0.99, 1.05, 1.05, 1.18, 1.35),
    ("interleaved_1f1b", 1.0): (0.98,) * 5,
}
"""Least planned step over ours, by scenario."""
GOALS_AGAINST_1F1B = {("interleaved_zero_bubble", 1.5): (1.12, 1.18, 1.18, 1.50, 1.20)}
"""Goals against planned 1f1b."""


def run(rank: int, arguments: argparse.Namespace, port: int, result: str) -> None:
    """Run every contender on one rank; rank 0 saves the results."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("pp",))["pp"]
    count = arguments.microbatches
    tokens = torch.zeros(count, 2, 4, dtype=torch.float64)
    prepared = Prepared({"tokens": tokens}, {"x": tokens}, torch.ones(count), float(count))
    found = []
    with mock.patch.object(pipelined, "Planned", LatePlanned):
        built = [(one, one.build(mesh, count, arguments.transport)) for one in CONTENDERS]
        warm = Scenario("warm up")
        for scenario in (warm, *[s for s in SCENARIOS if s.name in arguments.scenarios]):
            for seed in range(1 if scenario is warm else arguments.seeds):
                for contender, executor in built:
                    seconds = scenario.seconds(
                        len(executor.stage_ranks),
                        count,
                        arguments.unit / contender.virtual_stages,
                        seed,
                    )
                    watch = prepare_step(executor, seconds, scenario.link * arguments.unit)
                    dist.barrier()
                    start = time.monotonic()
                    executor.step(prepared)
                    span = start, time.monotonic()
                    if scenario is not warm:
                        found.append((scenario, seed, contender, span, watch.ran))
        for _, executor in built:
            if hasattr(executor, "transport"):
                executor.transport.close()
    gathered: list[Any] = [None] * RANKS
    dist.all_gather_object(gathered, found)
    if rank == 0:
        torch.save(gathered, result)
    dist.barrier()
    dist.destroy_process_group()


def rows_of(ranks: Sequence[Sequence[Any]], unit: float) -> list[dict[str, Any]]:
    """A row for each scenario and contender; geometric means over the seeds."""
    steps: dict[tuple[str, Contender], list[float]] = defaultdict(list)
    errors: dict[tuple[str, Contender], list[float]] = defaultdict(list)
    for same in zip(*ranks, strict=True):
        scenario, _, contender = same[0][:3]
        starts, ends = zip(*(span for *_, span, _ in same), strict=True)
        step = max(ends) - min(starts)
        order, took = as_they_were([ran for *_, ran in same])
        simulated = simulate(
            order, lambda action, took=took: took[action], latency=scenario.link * unit
        )
        steps[scenario.name, contender].append(step)
        errors[scenario.name, contender].append(step / simulated.makespan)
    rows = []
    for (name, contender), own in steps.items():
        planned = Contender(contender.schedule, contender.virtual_stages, None)
        row: dict[str, Any] = {"scenario": name, "contender": str(contender)}
        row["step, s"] = round(statistics.mean(own), 3)
        row["planned / this"] = gain(steps[name, planned], own)
        row["goal"] = goal(GOALS, name, contender)
        row["planned 1f1b / this"] = gain(steps[name, ONE_F_ONE_B], own)
        row["its goal"] = goal(GOALS_AGAINST_1F1B, name, contender)
        row["measured / simulated"] = round(statistics.geometric_mean(errors[name, contender]), 3)
        rows.append(row)
    return rows


def goal(goals: Mapping[tuple[str, float], Sequence[float]], name: str, of: Contender) -> str:
    """The least gain of a contender in a scenario; "" without one."""
    by_scenario = goals.get((of.schedule, of.memory or 0.0))
    number = [scenario.name for scenario in SCENARIOS].index(name)
    return f">= {by_scenario[number]:g}" if by_scenario else ""


def gain(before: Sequence[float], after: Sequence[float]) -> float:
    """Geometric mean of the ratios, seed by seed."""
    pairs = zip(before, after, strict=True)
    return round(statistics.geometric_mean(b / a for b, a in pairs), 3)


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the contenders; a row for each scenario and contender."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        result = f"{folder}/times.pt"
        given = arguments, port, result
        mp.start_processes(run, args=given, nprocs=RANKS, start_method="spawn")
        found = torch.load(result, weights_only=False)
    return rows_of(found, arguments.unit)


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--unit", type=float, default=0.04, help="seconds of a forward on one rank")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--transport", default="auto")
    names = [scenario.name for scenario in SCENARIOS]
    parser.add_argument("--scenarios", nargs="+", choices=names, default=names)
    parser.add_argument("--out", help="JSON file to write")
    return parser.parse_args(arguments)


def main() -> None:
    """Print the table."""
    arguments = parsed()
    rows = measure(arguments)
    finish("dynamic", rows, arguments.out, unit_s=arguments.unit, seeds=arguments.seeds)


if __name__ == "__main__":
    main()
