"""One training step per pipeline rank on fake tensors, with the parts of a run."""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # registers collectives on fake tensors
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import debug
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from titan_dit.build import (
    build_stages,
    copies_of,
    executor_of,
    float8_lines,
    own_parameters,
    place_modules,
)
from titan_dit.config.layout import as_planned
from titan_dit.config.training import EMAConfig, TrainingConfig
from titan_dit.data.base import Batch, Field
from titan_dit.dry_run.memory import STATE, MemoryLog, Peak, StorageKind, local
from titan_dit.dry_run.pipeline import growth_of, idle_of, microbatches_to_run
from titan_dit.dry_run.traffic import Traffic, TrafficLog
from titan_dit.execution import Executor, with_dropout_words
from titan_dit.kernels import cross_entropy
from titan_dit.models import quantized
from titan_dit.models.base import ModelSpec
from titan_dit.objectives.base import Objective, Prepared
from titan_dit.optim.ema import EMA
from titan_dit.optim.gradient_norm import clip_norm
from titan_dit.optim.optimizer import apply_gradients, build_optimizer
from titan_dit.optim.sections import OptimizerConfig
from titan_dit.optim.stochastic_rounding import ROUNDED_AT_ONCE
from titan_dit.parallel import offload
from titan_dit.parallel.init import allocate
from titan_dit.parallel.mesh import Mesh
from titan_dit.parallel.p2p_groups import P2PGroups
from titan_dit.plan import RunPlan
from titan_dit.rng import SampleRNG
from titan_dit.system.progress import ProgressLine


class Awaited(dist.Work):
    """A `Work` whose `is_completed` waits for it."""

    def __init__(self, work: dist.Work) -> None:
        super().__init__()
        self.work: dist.Work | None = work

    def is_completed(self) -> bool:
        """Wait until the work is done; True."""
        return self.wait()

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        """Wait until the work is done. Later calls return at once: gloo hangs in a second wait."""
        work, self.work = self.work, None
        return True if work is None else work.wait()


def await_sends(p2p: P2PGroups) -> None:
    """Make the works of sent messages report their completion.

    The works of gloo and of the fake process group never do, so all sent tensors would be held
    until the end of a pass. NCCL's do, once the receiver has got the message.
    """
    send: Any = p2p.send

    def awaited(tensors: Sequence[Tensor], target: int) -> list[dist.Work]:
        return [Awaited(work) for work in send(tensors, target)]

    p2p.send = awaited  # type: ignore[method-assign]


CPU = torch.device("cpu")


@dataclass(frozen=True)
class RankReport:
    """Memory, traffic and FLOPs of one rank and step."""

    rank: int
    layers: tuple[range, ...]
    """Layers of each of its stages."""
    parameters: int
    """Elements of its shards, without copies of tied weights."""
    peak: Peak
    traffic: Traffic
    flops: float
    """Its share of the model FLOPs, forward and backward."""
    idle: float
    """Pipeline bubble: share of the step spent waiting for other stages, in the planned order."""
    notes: tuple[str, ...] = ()
    """Console lines of a run about its layers."""


@dataclass(frozen=True)
class Report:
    """The dry run of a step."""

    plan: RunPlan
    num_parameters: int
    flops_per_sample: int
    num_microbatches: int
    """Microbatches per rank and step."""
    microbatch_size: int
    num_run: int
    """Microbatches that the dry run executed; memory and traffic of the rest are extrapolated."""
    ranks: tuple[RankReport, ...]
    """The first rank of every pipeline rank that was run."""

    @property
    def peak(self) -> int:
        """Peak bytes of the rank that needs most memory."""
        return max(rank.peak.total for rank in self.ranks)


def take_fake_step(
    plan: RunPlan,
    objective: Objective,
    fields: Mapping[str, Field],
    training: TrainingConfig,
    optimizer: OptimizerConfig,
    ema: EMAConfig,
    ranks: Sequence[int] | None = None,
) -> Report:
    """Run a step of the pipeline ranks `ranks`, None: of all. `fields`: fields of the dataset.

    With `ranks` given it is faster, as only one number of microbatches is run: memory is the same,
    but traffic is that of `num_run` microbatches.
    """
    # torch.compile needs real tensors; its savings are not modelled.
    requested, sizes = plan, plan.sizes
    plan = replace(plan, compile=replace(plan.compile, enabled=False))
    # The generator draws a tensor in one fake operation, the counter in one for each chunk.
    plan = replace(plan, initial_weights="generator")
    # In a planned order each rank can run alone. `growth_of` adds the activations that a run-time
    # order may hold beyond that.
    if plan.decides_at_run_time:
        plan = replace(plan, pipeline=replace(as_planned(plan.pipeline), runtime="own"))
    # torch's schedules refuse some numbers of microbatches that are run here. Both runtimes hold
    # the same tensors.
    elif sizes.pp > 1 and plan.runtime.torch:
        plan = replace(plan, pipeline=replace(plan.pipeline, runtime="auto"))
    # The CPU lacks most attention kernels. All fused ones save the same tensors.
    if plan.precision.attention != "math":
        plan = replace(plan, precision=replace(plan.precision, attention="auto"))
    share, size, count = plan.samples_per_rank, plan.microbatch_size, plan.num_microbatches
    fewer, enough = microbatches_to_run(plan, count)
    if ranks is not None:
        fewer = 0
    growth = growth_of(requested, enough, count)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    reports, idle = [], idle_of(plan, count)
    ranks = range(sizes.pp) if ranks is None else ranks
    progress = ProgressLine(len(ranks), "ranks", what=f"dry run ({sizes})")
    for stage_rank in ranks:
        world = fake_world(stage_rank * (plan.world_size // sizes.pp), plan.world_size)
        with world, chunks_of_a_device():
            mesh = Mesh(sizes, "cpu")
            await_sends(mesh.p2p)
            fake_rank = FakeRank(plan, objective, fields, mesh, mode, (training, optimizer, ema))
            traffic = fake_rank.run(share, size, fewer, enough, count)
            held = tuple(plan.stage_layers[stage] for stage in sorted(fake_rank.parts))
            flops = flops_of(plan.spec, held, fake_rank.flops_per_sample) * share
            reports.append(
                RankReport(
                    rank=dist.get_rank(),
                    layers=held,
                    parameters=elements(fake_rank.parameters.values(), plan),
                    peak=with_frozen(
                        fake_rank.memory.peak(
                            growth[stage_rank], STATE if plan.offload.parameters else ()
                        ),
                        plan,
                    ),
                    traffic=traffic,
                    flops=flops / (sizes.model // sizes.pp),
                    idle=idle[stage_rank],
                    notes=tuple(float8_lines(plan, fake_rank.parts)),
                )
            )
            del fake_rank
        progress.add(1)
    progress.end()
    with torch.device("meta"):
        model = plan.spec.build()
    return Report(
        plan=requested,
        num_parameters=sum(p.numel() for p in model.parameters()),
        flops_per_sample=model.flops_per_sample(plan.spec.num_attended_tokens),
        num_microbatches=count,
        microbatch_size=size,
        num_run=enough,
        ranks=tuple(reports),
    )


@contextmanager
def chunks_of_a_device() -> Iterator[None]:
    """Use a GPU's chunks of logits and of rounded weights: a CPU's would take minutes."""
    own, cross_entropy.CHUNK = cross_entropy.CHUNK, cross_entropy.CHUNK_ON_DEVICE
    rounded = ROUNDED_AT_ONCE["cpu"]
    ROUNDED_AT_ONCE["cpu"] = ROUNDED_AT_ONCE["cuda"]
    try:
        yield
    finally:
        cross_entropy.CHUNK, ROUNDED_AT_ONCE["cpu"] = own, rounded


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    """Initialise a fake process group of `size` ranks as `rank`."""
    # DTensor caches process groups by mesh, and meshes of all ranks compare equal.
    debug._clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    # Warnings about collectives belong to the real run.
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        dist.destroy_process_group()


class FakeRank:
    """One rank: builds what `Trainer` builds, runs its step, logs memory and traffic."""

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
        # DeviceMesh needs real tensors to find its rank, so the model is sharded outside fake mode.
        self.parts, _, (self.flops_per_sample,) = build_stages(plan, mesh)
        self.memory, self.traffic = MemoryLog(), TrafficLog(mesh)
        with mode, self.memory, self.memory.phase("set-up", StorageKind.TEMPORARY):
            for part in self.parts.values():
                # Fake tensors have no values; sharding whole ones would take most of the time.
                allocate(part, CPU)
            self.parameters = own_parameters(self.parts)
            if plan.num_stages - 1 in self.parts:
                self.parameters |= place_modules(plan, objective, mesh, CPU)
            self.optimizer = build_optimizer(
                self.parameters, self.optimizer_config, plan.spec, copies_of(self.parts)
            )
            self.ema = EMA(self.parameters, ema)
            for part in self.parts.values():  # With copies of tied weights.
                self.memory.mark(part.parameters(), StorageKind.PARAMETERS)
            self.memory.mark(self.parameters.values(), StorageKind.PARAMETERS)
            for average in self.ema.averages.values():
                self.memory.mark(average.values(), StorageKind.EMA)

    def run(self, share: int, size: int, fewer: int, enough: int, count: int) -> Traffic:
        """Run a step of `fewer`, then one of `enough` microbatches; return the traffic of `count`.

        `memory` holds the log of the second step. If `fewer` is 0, the first step is an optimizer
        step alone, and the traffic is that of `enough` microbatches.
        """
        with self.mode, self.memory, self.traffic:
            # Warm-up: allocates the optimizer's state, and gives the first traffic count.
            if fewer:
                self.step(share, size, fewer)
            else:
                self.update_alone()
            before = self.traffic.restart()
            gc.collect()
            self.memory.begin()
            self.step(share, size, enough)
        found = self.traffic.traffic
        return found.extrapolate(count, enough, before, fewer) if fewer else found

    def step(self, share: int, size: int, count: int) -> None:
        """`Trainer.train_step` on `count` microbatches of `size` from a rank's `share` samples."""
        log = self.memory
        with log.phase("inputs", StorageKind.INPUTS):
            prepared = first_rows(self.prepare(share), size * count)
            # The objective keeps them: they may be from an earlier fake step.
            log.mark(prepared.static.values(), StorageKind.INPUTS)
        executor = self.executor(size * count)
        with log.phase("forward and backward", StorageKind.ACTIVATIONS):
            executor.step(prepared)
            log.mark((p.grad for p in self.parameters.values()), StorageKind.GRADIENTS)
        for part in self.parts.values():
            log.mark(offload.buffers_of(part), StorageKind.HOST)
        self.update()

    def update_alone(self) -> None:
        """An optimizer step with uninitialised gradients: it allocates the optimizer's state."""
        for parameter in self.parameters.values():
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
        self.update()

    def update(self) -> None:
        """Gradient clipping, optimizer step and EMA, as in `Trainer.train_step`."""
        log = self.memory
        on_host = self.plan.offload.parameters
        work = StorageKind.HOST if on_host else StorageKind.TEMPORARY
        with log.phase("optimizer", work):
            bad = ~clip_norm(self.parameters.values(), self.training.max_grad_norm).isfinite()
            with HostReads():  # type: ignore[no-untyped-call]
                apply_gradients(self.optimizer, self.optimizer_config.lr, skip=bad)
            for state in self.optimizer.state.values():
                log.mark(state.values(), StorageKind.OPTIMIZER)
        with log.phase("EMA", work):
            self.ema.update(self.ema.config.every, skip=bad)

    def prepare(self, share: int) -> Prepared:
        """Prepare a batch of `share` samples whose fields are zero."""
        return prepare_zeros(self.plan, self.objective, self.fields, share)

    def executor(self, rows: int) -> Executor:
        """The executor for a batch with `rows` samples on this rank."""
        plan = replace(self.plan, global_batch_size=rows * self.mesh.sizes.data)
        return executor_of(plan, self.objective, self.mesh, self.parts, CPU)


def prepare_zeros(
    plan: RunPlan, objective: Objective, fields: Mapping[str, Field], size: int
) -> Prepared:
    """Prepare a batch of `size` samples whose fields are zero, as a training step does."""
    empty = {
        name: torch.zeros(size, *(length or 1 for length in field.shape), dtype=field.dtype)
        for name, field in fields.items()
    }
    numbers = torch.arange(size)
    batch = Batch(empty, numbers, torch.ones(size), total_weight=float(plan.global_batch_size))
    own = objective.prepare
    prepare = with_dropout_words(own, lambda _: plan.spec) if plan.lora.dropout else own
    return prepare(batch, SampleRNG(plan.seed, numbers))


class HostReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives values to an optimizer's reads on the host, since fake tensors have none.

    A bool (`skip`) is False, a number 1. The unfused AdamW reads both in its first step.
    """

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run every other operator as it is."""
        if func is torch.ops.aten._local_scalar_dense.default:
            return int(args[0].dtype != torch.bool)
        return func(*args, **(kwargs or {}))


def with_frozen(peak: Peak, plan: RunPlan) -> Peak:
    """A peak with this rank's shards of frozen modules, which run before the step."""
    held = round(plan.frozen.bytes_on(plan.sizes.data))
    return replace(peak, bytes={**peak.bytes, StorageKind.FROZEN: held})


def elements(parameters: Iterable[Tensor], plan: RunPlan) -> int:
    """Elements of this rank's shards; of quantised weights, when decoded."""
    codes = quantized.weight_codes(plan.lora.base, CPU)
    shapes = (
        codes.shape_of(p.shape) if codes and not p.is_floating_point() else p.shape
        for p in map(local, parameters)
    )
    return sum(math.prod(shape) for shape in shapes)


def first_rows(prepared: Prepared, rows: int) -> Prepared:
    """Views of the first samples, not copies: the whole batch stays in memory, as in training."""
    return next(prepared.microbatches(rows))


def flops_of(model_spec: ModelSpec, held: tuple[range, ...], flops_per_sample: int) -> float:
    """FLOPs per sample of these layers, with embedding and head on the first and last stage."""
    cost = sum(map(model_spec.cost, held))
    return flops_per_sample * cost / model_spec.cost(range(model_spec.num_layers))
