"""One training step per pipeline rank: the trainer's own parts on fake tensors, one process.

Ranks that differ only in their place along the data, context and tensor axes do the same, so the
first of them stands for all; pipeline ranks differ, so each has its turn. torch's fake process
group answers every collective at once, and fake tensors have shapes but no memory.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # what collectives give for fake tensors
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import debug
from torch.testing._internal.distributed.fake_pg import FakeStore

from titan_dit.config.section import UserError
from titan_dit.config.training import EMAConfig, OptimizerConfig, TrainingConfig
from titan_dit.data.base import Batch, Field
from titan_dit.dry_run.memory import MemoryLog, Peak, StorageKind, local
from titan_dit.dry_run.traffic import Traffic, TrafficLog
from titan_dit.execution.base import Executor
from titan_dit.execution.build import executor_of, place_modules, spread
from titan_dit.execution.pipelined import PipelinedExecutor
from titan_dit.execution.sliced import SlicedExecutor
from titan_dit.models.base import ModelSpec
from titan_dit.objectives.base import Objective, Prepared
from titan_dit.optim.ema import EMA
from titan_dit.optim.gradient_norm import clip_norm
from titan_dit.optim.optimizer import apply_gradients, build_optimizer
from titan_dit.parallel.init import initialize
from titan_dit.parallel.mesh import Mesh
from titan_dit.plan import RunPlan
from titan_dit.rng import SampleRNG
from titan_dit.schedules.action import peak_activations
from titan_dit.schedules.simulator import simulate, stage_costs

CPU = torch.device("cpu")


@dataclass(frozen=True)
class RankReport:
    """What one rank would do in a step."""

    rank: int
    layers: tuple[range, ...]
    """Of each of its stages."""
    parameters: int
    """Elements of its shards."""
    peak: Peak
    traffic: Traffic
    flops: float
    """Its share of the model's, forward and backward."""
    idle: float
    """Share of the step that it waits for other stages."""


@dataclass(frozen=True)
class Report:
    """A step of the whole run."""

    plan: RunPlan
    num_parameters: int
    flops_per_sample: int
    num_microbatches: int
    """Of a rank and step."""
    microbatch_size: int
    num_run: int
    """Microbatches that were run to find out: more would have held no more at once."""
    ranks: tuple[RankReport, ...]
    """The first rank of every pipeline stage."""


def rehearse(
    plan: RunPlan,
    objective: Objective,
    fields: Mapping[str, Field],
    training: TrainingConfig,
    optimizer: OptimizerConfig,
    ema: EMAConfig,
) -> Report:
    """Take the step of every distinct rank; `fields` are those of the data."""
    # torch.compile needs real tensors. What it would spare is not spared here.
    asked, sizes = plan, plan.sizes
    plan = replace(plan, compile=replace(plan.compile, enabled=False))
    # Played on a CPU, which lacks most kernels. Those that are fused all keep the same.
    if plan.precision.attention != "math":
        plan = replace(plan, precision=replace(plan.precision, attention="auto"))
    share, size, count = plan.samples_per_rank, plan.microbatch_size, plan.num_microbatches
    fewer, enough = microbatches_to_run(plan, count)
    growth = growth_of(plan, enough, count)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    reports = []
    for stage_rank in range(sizes.pp):
        with fake_world(stage_rank * (plan.world_size // sizes.pp), plan.world_size):
            mesh = Mesh(sizes, "cpu")
            rehearsal = Rehearsal(plan, objective, fields, mesh, mode, (training, optimizer, ema))
            peak, traffic = rehearsal.run(share, size, fewer, enough, count)
            peak = with_activations(peak, growth[stage_rank])
            held = tuple(plan.stage_layers[stage] for stage in sorted(rehearsal.parts))
            flops = flops_of(plan.spec, held, rehearsal.flops_per_sample) * share
            reports.append(
                RankReport(
                    rank=dist.get_rank(),
                    layers=held,
                    parameters=sum(local(p).numel() for p in rehearsal.parameters.values()),
                    peak=peak,
                    traffic=traffic,
                    flops=flops / (sizes.model // sizes.pp),
                    idle=0.0,
                )
            )
            del rehearsal
    idle = idle_of(plan, count)
    with torch.device("meta"):
        model = plan.spec.build()
    return Report(
        plan=asked,
        num_parameters=sum(p.numel() for p in model.parameters()),
        flops_per_sample=model.flops_per_sample(plan.spec.num_tokens),
        num_microbatches=count,
        microbatch_size=size,
        num_run=enough,
        ranks=tuple(replace(r, idle=share) for r, share in zip(reports, idle, strict=True)),
    )


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    """Be one rank of many, without the others."""
    # DTensor remembers process groups by meshes that look the same to every rank.
    debug._clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    # What a real run says of its collectives, it says then.
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        dist.destroy_process_group()


class Rehearsal:
    """One rank: what `Trainer` builds, and its step, with a log of both."""

    def __init__(
        self,
        plan: RunPlan,
        objective: Objective,
        fields: Mapping[str, Field],
        mesh: Mesh,
        mode: FakeTensorMode,
        sections: tuple[TrainingConfig, OptimizerConfig, EMAConfig],
    ) -> None:
        self.plan, self.objective, self.fields = plan, objective, fields
        self.mesh, self.mode = mesh, mode
        self.training, self.optimizer_config, ema = sections
        # A mesh asks real tensors which rank this is, so the network is spread out here.
        self.parts, _, self.flops_per_sample = spread(plan, mesh)
        self.memory, self.traffic = MemoryLog(), TrafficLog(mesh)
        with mode, self.memory, self.memory.phase("set-up", StorageKind.TEMPORARY):
            for part in self.parts.values():
                initialize(part, part.initializers(), plan.seed, CPU)
            self.parameters = {
                name: p for part in self.parts.values() for name, p in part.named_parameters()
            }
            if plan.num_stages - 1 in self.parts:
                self.parameters |= place_modules(plan, objective, mesh, CPU)
            self.optimizer = build_optimizer(self.parameters.values(), self.optimizer_config)
            self.ema = EMA(self.parameters, ema)
            self.memory.mark(self.parameters.values(), StorageKind.PARAMETERS)
            for average in self.ema.averages.values():
                self.memory.mark(average.values(), StorageKind.EMA)

    def run(
        self, share: int, size: int, fewer: int, enough: int, count: int
    ) -> tuple[Peak, Traffic]:
        """Two steps, of fewer microbatches and of enough; what `count` of them would take."""
        with self.mode, self.memory, self.traffic:
            # The first step makes what later ones keep, and tells what a microbatch sends.
            self.step(share, size, fewer)
            before = self.traffic.restart()
            gc.collect()
            self.memory.begin()
            self.step(share, size, enough)
        return self.memory.peak(), self.traffic.traffic.at(count, enough, before, fewer)

    def step(self, share: int, size: int, count: int) -> None:
        """What `Trainer.train_step` does, with `count` of the rank's microbatches."""
        log = self.memory
        with log.phase("inputs", StorageKind.INPUTS):
            prepared = first_rows(self.prepare(share), size * count)
        executor = self.executor(size * count)
        with log.phase("forward and backward", StorageKind.ACTIVATIONS):
            executor.step(prepared)
            log.mark((p.grad for p in self.parameters.values()), StorageKind.GRADIENTS)
        with log.phase("optimizer", StorageKind.TEMPORARY):
            bad = ~clip_norm(self.parameters.values(), self.training.max_grad_norm).isfinite()
            apply_gradients(self.optimizer, self.optimizer_config.lr, skip=bad)
            for state in self.optimizer.state.values():
                log.mark(state.values(), StorageKind.OPTIMIZER)
        with log.phase("EMA", StorageKind.TEMPORARY):
            self.ema.update(self.ema.config.every, skip=bad)

    def prepare(self, share: int) -> Prepared:
        """A batch of nothing, with its random numbers."""
        empty = {
            name: torch.zeros(share, *(size or 1 for size in field.shape), dtype=field.dtype)
            for name, field in self.fields.items()
        }
        batch = Batch(
            fields=empty,
            sample_numbers=torch.arange(share),
            weight=torch.ones(share),
            total_weight=float(self.plan.global_batch_size),
        )
        return self.objective.prepare(batch, SampleRNG(self.plan.seed, batch.sample_numbers))

    def executor(self, rows: int) -> Executor:
        """The executor of a batch of which this rank has so many rows."""
        plan = replace(self.plan, global_batch_size=rows * self.mesh.sizes.data)
        executor = executor_of(plan, self.objective, self.mesh, self.parts, CPU)
        if pipeline := pipelined(executor):
            pipeline.runtime.trust_shapes()
        return executor


def first_rows(prepared: Prepared, rows: int) -> Prepared:
    """The first rows of a batch, as views: the whole batch stays in memory."""
    return next(prepared.microbatches(rows))


def pipelined(executor: Executor) -> PipelinedExecutor | None:
    """The pipeline's executor, if there is a pipeline."""
    inner = executor.inner if isinstance(executor, SlicedExecutor) else executor
    return inner if isinstance(inner, PipelinedExecutor) else None


MOST_MICROBATCHES = 16
"""Run no more of them than this, or four times the stages. Only gpipe holds more at once."""


def microbatches_to_run(plan: RunPlan, count: int) -> tuple[int, int]:
    """Two numbers of microbatches: as few as can be, and enough to hold as many as `count` do."""
    pp = plan.sizes.pp
    if pp == 1:
        # From the second microbatch on, the gradients of those before are there as well.
        return 1, min(count, 2)
    wanted = peak_activations(plan.order(count))
    fewer = None
    for number in range(1, count):
        try:
            order = plan.order(number)
        except UserError:
            continue
        enough = peak_activations(order) == wanted or number >= max(MOST_MICROBATCHES, 4 * pp)
        # Two numbers tell what one more microbatch sends.
        if enough and fewer is not None:
            return fewer, number
        fewer = number if fewer is None else fewer
    return count if fewer is None else fewer, count


def growth_of(plan: RunPlan, run: int, count: int) -> list[float]:
    """How many times more each pipeline rank holds with `count` microbatches than with `run`."""
    if plan.sizes.pp == 1:
        return [1.0]
    held, of_run = (peak_activations(plan.order(number)) for number in (count, run))
    return [whole / part for whole, part in zip(held, of_run, strict=True)]


def with_activations(peak: Peak, times: float) -> Peak:
    """A peak of that many times the activations."""
    more = {StorageKind.ACTIVATIONS: round(peak.bytes[StorageKind.ACTIVATIONS] * times)}
    return replace(peak, bytes={**peak.bytes, **more})


def flops_of(model_spec: ModelSpec, held: tuple[range, ...], flops_per_sample: int) -> float:
    """The share of a sample's FLOPs that these layers, and what stands at the ends, take."""
    embed, head = model_spec.embed_cost, model_spec.head_cost
    cost: float = sum(map(len, held))
    cost += embed * any(0 in layers for layers in held)
    cost += head * any(model_spec.num_layers - 1 in layers for layers in held)
    return flops_per_sample * cost / (model_spec.num_layers + embed + head)


def idle_of(plan: RunPlan, count: int) -> list[float]:
    """The share of a step that each pipeline rank waits."""
    if plan.sizes.pp == 1:
        return [0.0]
    # A layer's forward costs as much as the gradient of its input, or that of its weights.
    layers = [len(part) for part in plan.stage_layers]
    costs = stage_costs(layers, embed=plan.spec.embed_cost, head=plan.spec.head_cost)
    simulation = simulate(plan.order(count), costs)
    return [idle / simulation.makespan for idle in simulation.idle]
