"""The memory of a layout's fullest rank, and what else a search asks about a layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from titan_dit.dry_run.memory import StorageKind
from titan_dit.parallel.mesh import AxisSizes
from titan_dit.plan import RunPlan
from titan_dit.planner import memory as memory_of
from titan_dit.planner import step
from titan_dit.planner.hardware import Device
from titan_dit.planner.links import Links
from titan_dit.planner.memory import Needed
from titan_dit.planner.step import Estimate
from titan_dit.planner.work import Counts

CountsOf = Callable[[RunPlan], Counts]
Held = Mapping[StorageKind, float]
ROUNDS = 3
"""Rounds of `pp` microbatches after which no schedule but gpipe has more in flight."""


@dataclass(frozen=True)
class Model:
    """What a search asks about a layout; tests replace it."""

    counts: CountsOf
    estimate: Callable[[RunPlan, Counts, Device], Estimate] = step.estimate
    bound: Callable[[RunPlan, Counts, Device], float] = step.bound
    memory: Callable[[RunPlan, Counts], Sequence[Held]] = memory_of.memory
    needed: Callable[[Held, RunPlan, Device], Needed] = memory_of.needed


def fullest(
    model: Model, plan: RunPlan, counts: Counts, device: Device
) -> tuple[Held, Needed, int]:
    """Memory of the pipeline rank that needs most, and the rank."""
    shorter = shortened(plan)
    rest = counts.inputs * (plan.samples_per_rank - shorter.samples_per_rank)
    found = []
    for rank, held in enumerate(model.memory(shorter, counts)):
        whole = {**held, StorageKind.INPUTS: held[StorageKind.INPUTS] + rest}
        found.append((whole, model.needed(whole, plan, device), rank))
    return max(found, key=lambda one: one[1].total)


def tp_crosses_nodes(sizes: AxisSizes, device: Device) -> bool:
    """True if a tp group has ranks on several nodes: predictions of such steps are too fast."""
    return Links(sizes, device).group("tp").nodes > 1


def shortened(plan: RunPlan) -> RunPlan:
    """The plan with fewer microbatches, as many in flight: an order of many takes long to read."""
    most = ROUNDS * plan.sizes.pp
    fixed = plan.pipeline.schedule == "gpipe" or plan.order_of_file is not None
    if plan.sizes.pp == 1 or fixed or plan.num_microbatches <= most:
        return plan
    batch = most * plan.microbatch_size * plan.sizes.data
    return replace(plan, global_batch_size=batch, wanted_microbatch_size=plan.microbatch_size)
