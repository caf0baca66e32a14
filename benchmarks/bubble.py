"""Measured pipeline bubbles against the simulator: `python benchmarks/bubble.py`.

Four gloo ranks run every schedule through the trainer's own loop and through torch's runtime, in
turn. Stages only sleep for known times: in forward, for the input gradient and for the weight
gradient. Any other time is bubble, communication and the loop.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from remat import Storages
from report import finish
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import _disable_current_modes

from titan_dit.execution import Output
from titan_dit.objectives.base import Prepared
from titan_dit.parallel.p2p_groups import P2PGroups
from titan_dit.pipeline.events import PipelineEvent, unmarked
from titan_dit.pipeline.pipelined import PipelinedExecutor, PipelineParts, Planned
from titan_dit.pipeline.runtimes import Runtime
from titan_dit.pipeline.schedules.placement import pipeline_order, rank_of_stage, stages_of_rank
from titan_dit.pipeline.schedules.schedule import Kind, neighbours, schedule_of
from titan_dit.pipeline.schedules.simulator import Costs, simulate
from titan_dit.pipeline.schedules.torch_classes import torch_class
from titan_dit.pipeline.stage import Shapes
from titan_dit.pipeline.torch_runtime import TorchExecutor

TOKENS, WIDTH = 2, 4
FORWARD, INPUT, WEIGHT = 1.0, 1.0, 1.0
"""Cost of one rank's layers in units of `Case.unit`; a full backward is twice a forward."""


@dataclass(frozen=True)
class Case:
    """One pipeline; `unit` is the seconds of a forward through one rank's layers."""

    schedule: Any
    num_ranks: int
    num_microbatches: int
    virtual_stages: int
    unit: float

    @property
    def stages_per_rank(self) -> int:
        """Stages per rank."""
        return len(stages_of_rank(self.schedule, 0, self.num_ranks, self.virtual_stages))

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline."""
        return self.num_ranks * self.stages_per_rank

    @property
    def order(self) -> Any:
        """Actions of every rank."""
        return pipeline_order(
            self.schedule,
            num_ranks=self.num_ranks,
            num_microbatches=self.num_microbatches,
            virtual_stages=self.virtual_stages,
        )

    @property
    def costs(self) -> Costs:
        """Seconds of every action; the first stage has no input gradient."""
        share = self.unit / self.stages_per_rank
        costs = {
            (kind, stage): share * cost
            for stage in range(self.num_stages)
            for kind, cost in (
                (Kind.FORWARD, FORWARD),
                (Kind.BACKWARD, INPUT + WEIGHT),
                (Kind.BACKWARD_INPUT, INPUT),
                (Kind.BACKWARD_WEIGHT, WEIGHT),
            )
        }
        if schedule_of(self.schedule).splits_backward:
            # torch runs the first stage's whole backward as its weight gradient.
            costs[Kind.BACKWARD_INPUT, 0] = 0.0
            costs[Kind.BACKWARD_WEIGHT, 0] = share * (INPUT + WEIGHT)
        return costs


class Nap(torch.autograd.Function):
    """The identity, with a backward of known duration."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        """Return a copy."""
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """Sleep."""
        time.sleep(ctx.seconds)
        return gradient, None


class SleepingStage(nn.Module):
    """A stage with one weight and known durations, and no tied one."""

    tied: Mapping[str, str] = MappingProxyType({})
    embed = head = None

    def __init__(self, forward: float, input_: float, weight: float, is_first: bool) -> None:
        super().__init__()
        self.seconds = forward, input_, weight
        self.is_first = is_first
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, given: Any, static: Mapping[str, Tensor]) -> Any:
        """Sleep; map tokens (first stage) or a stream to a stream."""
        forward, input_, weight = self.seconds
        x = given["tokens"] if self.is_first else given[0]
        time.sleep(forward)
        # The first stage has no input gradient: that time goes to the weight gradient.
        nap = Nap.apply(self.weight, weight + input_ if self.is_first else weight)
        return (x + nap if self.is_first else Nap.apply(x, input_) + nap,)


class LastStage(SleepingStage):
    """The last stage, which returns the prediction."""

    def forward(self, given: Any, static: Mapping[str, Tensor]) -> Tensor:
        """Map a stream to a prediction."""
        (out,) = super().forward(given, static)
        prediction: Tensor = out
        return prediction


def mean(output: Output, targets: Mapping[str, Tensor]) -> Tensor:
    """A loss per token."""
    assert isinstance(output, Tensor)
    return output.mean(-1)


def run_case(case: Case, rank: int, repeats: int) -> Ran:
    """Run `repeats` timed steps of a case on one rank."""
    mesh = init_device_mesh("cpu", (case.num_ranks,), mesh_dim_names=("pp",))["pp"]
    last = case.num_stages - 1
    parts = {}
    for stage in stages_of_rank(case.schedule, rank, case.num_ranks, case.virtual_stages):
        kind = LastStage if stage == last else SleepingStage
        share = case.unit / case.stages_per_rank
        parts[stage] = kind(share * FORWARD, share * INPUT, share * WEIGHT, stage == 0)
    shape = 1, TOKENS, WIDTH
    stream = (torch.empty(shape, device="meta", requires_grad=True),)
    rows = case.num_microbatches
    links, stage_ranks = (
        P2PGroups(mesh),
        [rank_of_stage(case.schedule, stage, case.num_ranks) for stage in range(last + 1)],
    )
    links.open(neighbours(stage_ranks))
    given = PipelineParts(
        parts=parts,
        p2p=links,
        order=case.order,
        stage_ranks=stage_ranks,
        shapes=Shapes(
            stream=stream, predictions=stream, losses=torch.empty(shape[:2], device="meta")
        ),
        loss=mean,
        microbatch_size=1,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    runtime = Runtime("", torch_class(schedule_of(case.schedule)))
    executors: dict[str, PipelinedExecutor] = {
        "own": PipelinedExecutor(given),
        "torch": TorchExecutor(given, runtime=runtime),
    }
    tokens = torch.randn(rows, TOKENS, WIDTH)
    prepared = Prepared({"tokens": tokens}, {"x": tokens}, torch.ones(rows), float(rows))
    held = {name: most_held(executor, prepared) for name, executor in executors.items()}
    timed = [watch(stage) for stage in executors["own"].stages.values()]
    spans: dict[str, list[tuple[float, float]]] = {name: [] for name in executors}
    took: list[dict[tuple[Kind, int, int], float]] = []
    for repeat in range(repeats):
        for name, executor in turns(executors, repeat):
            for log in timed:
                log.clear()
            dist.barrier()
            start = time.monotonic()
            executor.step(prepared)
            spans[name].append((start, time.monotonic()))
            took = [dict(log) for log in timed] if name == "own" else took
    return Ran(spans, {key: value for log in took for key, value in log.items()}, held)


def turns(executors: dict[str, PipelinedExecutor], repeat: int) -> list[Any]:
    """The runtimes of a repeat; each begins in every second one."""
    return list(executors.items())[:: -1 if repeat % 2 else 1]


def most_held(executor: PipelinedExecutor, prepared: Prepared) -> float:
    """Peak of the live tensors of a step, in streams; the step also opens connections.

    Without sent outputs: gloo never reports that one has left.
    """
    live, most = Storages(), 0

    def mark(event: PipelineEvent, what: object) -> None:
        nonlocal most
        most = max(most, live.live_bytes(()))

    executor.mark = mark
    with live, mock.patch.object(Planned, "send", send_a_copy):
        executor.step(prepared)
    executor.mark = unmarked
    return most / (TOKENS * WIDTH * torch.float32.itemsize)


def send_a_copy(source: Any, message: Any, tensors: Any, send: Any = Planned.send) -> None:
    """Send what no tracked storage holds."""
    with _disable_current_modes():  # type: ignore[no-untyped-call]
        copies = tuple(tensor.clone() for tensor in tensors)
    send(source, message, copies)


@dataclass(frozen=True)
class Ran:
    """Measurements of one rank, in seconds of the machine's monotonic clock."""

    spans: dict[str, list[tuple[float, float]]]
    """Start and end of the step of each repeat, by runtime."""
    took: dict[tuple[Kind, int, int], float]
    """Seconds of each action of the own loop's last repeat, by kind, stage and microbatch."""
    held: dict[str, float]
    """Peak of live tensors, in streams, by runtime."""


def watch(stage: Any) -> dict[tuple[Kind, int, int], float]:
    """Wrap a stage to log the seconds of each action; return the log."""
    log: dict[tuple[Kind, int, int], float] = {}
    running: list[Kind] = []

    def timed(name: str, kind: Kind) -> None:
        function = getattr(stage, name)

        def wrapped(*args: Any) -> Any:
            if running:  # The first stage runs its weight gradient as a full backward.
                return function(*args)
            running.append(kind)
            start = time.monotonic()
            out = function(*args)
            # A stage takes its microbatches in sequence.
            number = sum(of == kind for of, _, _ in log)
            log[kind, stage.index, number] = time.monotonic() - start
            running.clear()
            return out

        setattr(stage, name, wrapped)

    timed("forward", Kind.FORWARD)
    timed("backward", Kind.BACKWARD)
    timed("backward_input", Kind.BACKWARD_INPUT)
    timed("backward_weight", Kind.BACKWARD_WEIGHT)
    return log


def rank_main(rank: int, num_ranks: int, port: int, cases: Sequence[Case], repeats: int) -> None:
    """Run every case on one rank; rank 0 saves the results."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks)
    found: list[Any] = [None] * num_ranks
    dist.all_gather_object(found, [run_case(case, rank, repeats) for case in cases])
    if rank == 0:
        torch.save(found, os.environ["BUBBLE_RESULT"])
    dist.barrier()
    dist.destroy_process_group()


def measure(cases: Sequence[Case], repeats: int, result: str) -> list[dict[str, Any]]:
    """One row per case. All need the same number of ranks; `result` is a temporary file."""
    (num_ranks,) = {case.num_ranks for case in cases}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ["BUBBLE_RESULT"] = result
    mp.start_processes(
        rank_main,
        args=(num_ranks, port, cases, repeats),
        nprocs=num_ranks,
        start_method="spawn",
    )
    found = torch.load(result, weights_only=False)
    return [row_of(case, [ranks[i] for ranks in found]) for i, case in enumerate(cases)]


def row_of(case: Case, ran: Sequence[Ran]) -> dict[str, Any]:
    """Idle fraction over all ranks: by theory, simulated, and measured.

    Simulated once with the sleeps, and once with the measured actions, which include torch's
    overhead. The latter differs from the measured fraction by communication.
    """
    took: dict[tuple[Kind, int], list[float]] = {}
    for rank in ran:
        for (kind, stage, _), seconds in rank.took.items():
            took.setdefault((kind, stage), []).append(seconds)
    busy = sum(sum(of_one) for of_one in took.values())
    start, end = zip(*(rank.spans["own"][-1] for rank in ran), strict=True)
    measured = 1 - busy / (case.num_ranks * (max(end) - min(start)))
    costs = {key: statistics.mean(of_one) for key, of_one in took.items()}
    simulated = simulate(case.order, costs).idle_fraction
    p, m, v = case.num_ranks, case.num_microbatches, case.stages_per_rank
    theory = (p - 1) / (v * m + p - 1) if not schedule_of(case.schedule).splits_backward else None
    return {
        "schedule": case.schedule,
        "p": p,
        "m": m,
        "v": v,
        "theory": "" if theory is None else round(theory, 4),
        "idle, simulated": round(simulate(case.order, case.costs).idle_fraction, 4),
        "with actions as they were": round(simulated, 4),
        "measured": round(measured, 4),
        "measured / simulated": round(measured / simulated, 3),
        "step, measured / simulated": round((1 - simulated) / (1 - measured), 4),
        "step, torch / own": round(steps(ran, "torch") / steps(ran, "own"), 4),
        "peak in streams, own": max(rank.held["own"] for rank in ran),
        "peak in streams, torch": max(rank.held["torch"] for rank in ran),
    }


def steps(ran: Sequence[Ran], runtime: str) -> float:
    """The median seconds of a step, from its first rank's start to its last rank's end."""
    repeats = zip(*(rank.spans[runtime] for rank in ran), strict=True)
    return statistics.median(max(e for _, e in each) - min(s for s, _ in each) for each in repeats)


def main() -> None:
    """Run every schedule on four ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--unit", type=float, default=0.08, help="seconds of a forward on one rank")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", help="JSON file to write")
    args = parser.parse_args()
    kinds = {
        "gpipe": 1,
        "1f1b": 1,
        "interleaved_1f1b": 2,
        "looped_bfs": 2,
        "interleaved_zero_bubble": 2,
        "zbv_zero_bubble": 1,
        "dualpipev": 1,
    }
    cases = [Case(name, 4, args.microbatches, v, args.unit) for name, v in kinds.items()]
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        rows = measure(cases, args.repeats, f"{folder}/times.pt")
    finish("bubble", rows, args.out, unit_s=args.unit, repeats=args.repeats)


if __name__ == "__main__":
    main()
