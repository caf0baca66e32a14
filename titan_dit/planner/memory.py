"""The peak memory of every pipeline rank by formula: no mesh, no dry run, below a millisecond.

Composed from one block's, embed's and head's counts. The peak is the highest of the moments that
`held.py` and `held_pipeline.py` list, of the optimizer's step and of the beginning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from titan_dit.dry_run.memory import StorageKind
from titan_dit.dry_run.pipeline import most_held
from titan_dit.parallel.compute_copies import FLOAT8
from titan_dit.parallel.fsdp import unit_sizes
from titan_dit.plan import RunPlan
from titan_dit.planner.hardware import Device
from titan_dit.planner.held import (
    Moment,
    Sharding,
    sharded_moments,
    single_moments,
)
from titan_dit.planner.held_pipeline import (
    InFlight,
    StageParts,
    exceeded,
    pipeline_moments,
    profile,
    profile_of_schedule,
    whole_table,
)
from titan_dit.planner.optimizer_state import ADAMW, OptimizerState
from titan_dit.planner.runtime import OURS, Runtime
from titan_dit.planner.work import Counts
from titan_dit.schedules.action import peak_activations

GIB, MIB_OF_GIB = 2**30, 2**10
WIDTH = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of an element."""


def memory(
    plan: RunPlan,
    counts: Counts,
    runtime: Runtime = OURS,
    state: OptimizerState = ADAMW,
    *,
    only_fullest: bool = False,
) -> list[dict[StorageKind, float]]:
    """Bytes at the peak by kind, of every pipeline rank. `state`: see `state_of`.

    `only_fullest`: a rank that holds no more than the one before it gets that one's bytes.
    """
    how = sharding_of(plan, runtime)
    how = replace(how, in_float8=in_float8(plan, counts, how))
    if plan.sizes.pp == 1:
        rank = (
            StageParts(
                counts=counts,
                layers=plan.spec.num_layers,
                has_embed=True,
                has_head=True,
                has_copy=False,
                units=(plan.spec.num_layers,),
            ),
        )
        return [at_peak(plan, rank, _local(plan, counts, how), how, runtime, state)]
    flights, growth = in_flight(plan)
    found: list[dict[StorageKind, float]] = []
    before: list[StageParts] = []
    skipped = exceeded_ranks(plan) if only_fullest else ()
    for pipeline_rank, flight in enumerate(flights):
        stages = stages_of(plan, counts, how, pipeline_rank)
        if pipeline_rank in skipped and are_alike(stages, before):
            found.append(found[-1])
            continue
        before = stages
        sending = sent_copy(plan, counts, how) if pipeline_rank == 0 else 0.0
        moments = pipeline_moments(flight, stages, how, growth[pipeline_rank], sending)
        found.append(at_peak(plan, stages, moments, how, runtime, state))
    return found


def _local(plan: RunPlan, counts: Counts, how: Sharding) -> Iterator[Moment]:
    """Moments without a pipeline."""
    if plan.world_size == 1 and plan.precision.float8 in FLOAT8:
        return single_moments(counts, plan.spec.num_layers, how)
    units = unit_sizes(
        plan.spec.num_layers, counts.block.parameters, plan.parallel.blocks_per_fsdp_unit
    )
    return sharded_moments(counts, units, how)


def sharding_of(plan: RunPlan, runtime: Runtime) -> Sharding:
    """How FSDP runs on a rank, see `parallel.fsdp.shard`."""
    sizes, wanted = plan.sizes, plan.parallel.reshard_after_forward
    replicas = sizes.product("copies")
    shards = sizes.product("fsdp")
    if runtime.sharding == "replicas":
        shards, replicas = sizes.cp, replicas * sizes.dp_shard
    width = WIDTH[plan.precision.dtype]
    keeps = sizes.pp > 1 or (shards == 1 and wanted == "auto") or runtime.sharding == "gradients"
    return Sharding(
        width=width,
        sum_width=max(width, WIDTH["fp32"]),
        shards=shards,
        has_copies=replicas > 1,
        reshards=not keeps and wanted != "never",
        reshards_root=not keeps and wanted == "always",
        prefetch=plan.parallel.prefetch,
        accumulates=plan.num_microbatches > 1,
    )


def in_float8(plan: RunPlan, counts: Counts, how: Sharding) -> float:
    """Share of a block's parameters that FSDP gathers in float8: see `parallel.float8.convert`."""
    if plan.precision.float8 != "tensorwise":
        return 0.0
    weights = {
        product: number * product.n * product.k
        for product, number in counts.block.forward.products.items()
    }
    found = sum(
        elements
        for product, elements in weights.items()
        if product.dtype == "float8" and product.n % how.shards == 0
    )
    return found / sum(weights.values())


def at_peak(
    plan: RunPlan,
    stages: Sequence[StageParts],
    moments: Iterator[Moment],
    how: Sharding,
    runtime: Runtime,
    state: OptimizerState,
) -> dict[StorageKind, float]:
    """The highest moment of a rank, with its state."""
    counts = stages[0].counts
    held = state_bytes(stages, how, state)
    held[StorageKind.INPUTS] = counts.static + counts.inputs * plan.samples_per_rank
    trained = sum(stage.trained - stage.copied for stage in stages) / how.shards
    update = Moment(
        gradients=how.sum_width * trained, temporary=optimizer_work(plan, stages, how, state)
    )
    every = [*moments, update]
    if runtime.state_bytes is not None:
        elements = sum(stage.parameters for stage in stages) / how.shards
        held |= given_state(elements, runtime, how)
        gathers = runtime.sharding != "replicas"
        every = [
            moment._replace(
                gathered=moment.gathered if gathers else 0.0,
                unreduced=moment.unreduced if gathers else 0.0,
                gradients=held[StorageKind.GRADIENTS],
            )
            for moment in every
        ]
    peak = max(every, key=sum)
    held |= {
        StorageKind.GATHERED: peak.gathered,
        StorageKind.UNREDUCED: peak.unreduced,
        StorageKind.GRADIENTS: peak.gradients,
        StorageKind.ACTIVATIONS: peak.activations,
        StorageKind.TEMPORARY: peak.temporary,
    }
    return held


def state_bytes(
    stages: Sequence[StageParts], how: Sharding, state: OptimizerState
) -> dict[StorageKind, float]:
    """Weights, optimizer and EMA of a rank's shards."""
    width = how.sum_width / how.shards
    parameters = optimizer = averaged = buffers = 0.0
    for stage in stages:
        counts = stage.counts
        parts = [(counts.block, state.block, stage.layers)]
        parts += [(counts.embed, state.embed, int(stage.has_embed))]
        parts += [(counts.head, state.head, int(stage.has_head))]
        parameters += stage.parameters
        averaged += stage.parameters - stage.copied
        optimizer += sum(part.trained * moments * count for part, moments, count in parts)
        buffers += sum(part.buffers * count for part, _, count in parts)
    return {
        StorageKind.PARAMETERS: width * parameters + buffers,
        StorageKind.OPTIMIZER: width * optimizer,
        StorageKind.EMA: width * averaged * state.averages,
    }


def given_state(elements: float, runtime: Runtime, how: Sharding) -> dict[StorageKind, float]:
    """The bytes of another trainer, of which only the sum is known."""
    assert runtime.state_bytes is not None
    weights = min(float(how.width), runtime.state_bytes)
    gradients = min(float(runtime.gradient_bytes), runtime.state_bytes - weights)
    return {
        StorageKind.PARAMETERS: weights * elements,
        StorageKind.GRADIENTS: gradients * elements,
        StorageKind.OPTIMIZER: (runtime.state_bytes - weights - gradients) * elements,
    }


def optimizer_work(
    plan: RunPlan, stages: Sequence[StageParts], how: Sharding, state: OptimizerState
) -> float:
    """Temporary bytes of the optimizer's step."""
    blocks = sum(stage.layers for stage in stages)
    if not state.matrices or not blocks:
        return 0.0
    elements = state.matrices * stages[0].counts.block.trained * blocks
    owners = how.shards * plan.sizes.tp
    number = blocks * state.num_matrices
    # A rank owns whole matrices.
    own = min(1.0, -(-number // owners) / number) * plan.sizes.tp
    received = state.received_work if owners > 1 else 0.0
    return elements * ((state.shard_work + received) / how.shards + state.whole_work * own)


def sent_copy(plan: RunPlan, counts: Counts, how: Sharding) -> float:
    """Bytes of tied weights that the first rank casts to send them: kept to the end of a step."""
    first, last = plan.stage_ranks[0], plan.stage_ranks[-1]
    if first == last or how.width == how.sum_width:
        return 0.0
    return how.width * counts.tied / how.shards


def stages_of(plan: RunPlan, counts: Counts, how: Sharding, pipeline_rank: int) -> list[StageParts]:
    """The stages of a pipeline rank."""
    last, found = plan.num_stages - 1, []
    for stage in plan.stages_of(pipeline_rank):
        layers = len(plan.stage_layers[stage])
        units = unit_sizes(layers, counts.block.parameters, plan.parallel.blocks_per_fsdp_unit)
        found.append(
            StageParts(
                counts=counts,
                layers=layers,
                has_embed=stage == 0,
                has_head=stage == last,
                has_copy=stage == last,
                units=units,
                whole_table=whole_table(counts, plan.sizes.tp, how.width),
            )
        )
    return found


def in_flight(plan: RunPlan) -> tuple[tuple[tuple[InFlight, ...], ...], tuple[float, ...]]:
    """What each rank has in flight, and how much more it may hold in a run-time order."""
    count = plan.num_microbatches
    if plan.order_of_file is not None:
        return profile(plan.order(count)), (1.0,) * plan.sizes.pp
    pipeline = plan.pipeline
    found = profile_of_schedule(pipeline.schedule, plan.sizes.pp, count, pipeline.virtual_stages)
    if not plan.decides_at_run_time:
        return found, (1.0,) * plan.sizes.pp
    planned = peak_activations(plan.order(count))
    most = most_held(plan, count)
    return found, tuple(most / own for most, own in zip(most, planned, strict=True))


def exceeded_ranks(plan: RunPlan) -> frozenset[int]:
    """Pipeline ranks that never have more in flight than the one before; none of an own order."""
    if plan.order_of_file is not None or plan.decides_at_run_time:
        return frozenset()
    order = plan.pipeline.schedule, plan.sizes.pp, plan.num_microbatches
    above = exceeded(*order, plan.pipeline.virtual_stages)
    return frozenset(rank for rank, is_above in enumerate(above) if is_above)


def are_alike(stages: Sequence[StageParts], others: Sequence[StageParts]) -> bool:
    """Whether two ranks of a plan have equal stages."""

    def kinds(each: Sequence[StageParts]) -> list[tuple[object, ...]]:
        return [(s.layers, s.has_embed, s.has_head, s.has_copy) for s in each]

    return kinds(stages) == kinds(others)


@dataclass(frozen=True, kw_only=True)
class Needed:
    """Device memory of a rank, GiB."""

    allocated: float
    """Tensors: torch's `max_memory_allocated`."""
    reserved: float
    """With what the caching allocator holds beside them: `max_memory_reserved`."""
    context: float
    """CUDA context, kernels and libraries."""
    communicators: float
    """Buffers of NCCL."""

    @property
    def total(self) -> float:
        """What nvidia-smi shows."""
        return self.reserved + self.context + self.communicators


def needed(held: Mapping[StorageKind, float], plan: RunPlan, device: Device) -> Needed:
    """What a rank that holds these bytes takes of a device."""
    overhead, allocated = device.overhead, sum(held.values()) / GIB
    return Needed(
        allocated=allocated,
        reserved=allocated * overhead.allocator,
        context=overhead.context_mib / MIB_OF_GIB,
        communicators=overhead.communicator_mib * len(communicators(plan)) / MIB_OF_GIB,
    )


def fits(found: Needed, device: Device) -> bool:
    """Whether a rank fits a device."""
    return found.total <= device.memory_gib


def communicators(plan: RunPlan) -> tuple[str, ...]:
    """The axes above 1 along which a rank communicates, and "all" for the gradient norm."""
    sizes = asdict(plan.sizes)
    found = [name for name, size in sizes.items() if size > 1]
    return (*found, "all") if found else ()
