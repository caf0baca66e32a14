"""Finds a layout with fewer mesh axes that fits the same device.

Only memory is compared, by a dry run of each candidate, at most three. Speed is for the planner.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch

from titan_dit.checks.device import rank_memory
from titan_dit.config.job import JobConfig
from titan_dit.config.layout import as_planned
from titan_dit.config.section import UserError, show
from titan_dit.dry_run.report import DEVICES_GIB, GIB, USABLE
from titan_dit.opening import plan_run
from titan_dit.parallel.mesh import FILL, axes
from titan_dit.plan import RunPlan

GPUS = ("A100, H100, 80 GB", "H200, 141 GB", "MI300X, 192 GB", "B300, 288 GB")
"""One device of each size. Without a GPU here, the smallest that holds the layout is taken."""
LARGEST_SHARD = 128
"""Maximum FSDP ranks of a candidate; with more data ranks it has replicas (HSDP). A ring of n ranks
takes n - 1 hops, and each rank's part of a block gets too small to fill a link."""
REPLICAS = "dp_replicate"
"""The axis that takes the data ranks beyond `LARGEST_SHARD`."""
DROPPED = ("pp", "tp", "cp")
"""Axes in the order in which they are dropped."""

PeakOf = Callable[[JobConfig, RunPlan], int]
"""(config, plan) -> peak bytes of the rank that needs most memory. May raise UserError."""


@dataclass(frozen=True)
class Candidate:
    """A layout with fewer axes."""

    flags: str
    """Flags to add to the command."""
    config: JobConfig
    plan: RunPlan


def lines(config: JobConfig, plan: RunPlan, peak: int, peak_of: PeakOf) -> Iterator[str]:
    """Console line about the simplest layout that fits; `peak`: bytes of the config's own layout.

    No line for a layout without pp, tp and cp, or if no known device holds it.
    """
    device = device_for(peak)
    if device is None or plan.sizes.model == 1:
        return
    where, space = device
    # CPU time: a dry run is one thread, and wall time depends on the machine's other work.
    start, needs = time.process_time(), list[str]()
    for candidate in candidates(config, plan):
        try:
            needed = peak_of(candidate.config, candidate.plan)
        except UserError as error:
            needs.append(f"{candidate.plan.sizes} is refused: {error}")
            continue
        took = f"found in {time.process_time() - start:.0f} s; which is faster: see `plan`"
        if needed <= space:
            yield (
                f"simpler {candidate.plan.sizes} needs {needed / GIB:.2f} GiB and fits {where}, "
                f"too: {candidate.flags} ({took})"
            )
            return
        needs.append(f"{candidate.plan.sizes} needs {needed / GIB:.2f} GiB")
    tried = "; ".join(needs) or "none can run this model and batch"
    yield f"simpler no layout with fewer axes fits {where}: {tried}"


def device_for(peak: int) -> tuple[str, float] | None:
    """(name, usable bytes) of this machine's GPU, else of the smallest known one that holds `peak`.

    None if `peak` does not fit.
    """
    if torch.cuda.is_available():
        size, where = rank_memory()
        found = [(where, USABLE * (size or 0))]
    else:
        sizes = {name.rpartition(", ")[2]: DEVICES_GIB[name] for name in GPUS}
        found = [(f"a GPU of {size}", USABLE * gib * GIB) for size, gib in sizes.items()]
    return next(((where, space) for where, space in found if peak <= space), None)


def candidates(config: JobConfig, plan: RunPlan) -> Iterator[Candidate]:
    """Layouts of the same ranks with fewer axes, the simplest first."""
    used = [axis for axis in DROPPED if getattr(plan.sizes, axis) > 1]
    for count in range(len(used), 0, -1):
        simpler = without(config, plan, used[:count])
        try:
            own = plan_run(simpler, plan.world_size)
        except UserError:
            continue
        yield Candidate(flags(config, simpler), simpler, own)


def without(config: JobConfig, plan: RunPlan, dropped: list[str]) -> JobConfig:
    """The config with these axes at 1; their ranks go to dp_shard and dp_replicate.

    The microbatch size stays, or becomes a divisor of it that divides a rank's smaller share.
    """
    kept = {axis: size for axis, size in asdict(plan.sizes).items() if axis not in dropped}
    for axis in (FILL, REPLICAS):
        del kept[axis]
    ranks = plan.world_size // math.prod(kept.values())
    most = max(1, LARGEST_SHARD // product(kept, "fsdp"))
    shard = next(size for size in range(min(ranks, most), 0, -1) if ranks % size == 0)
    sizes: dict[str, Any] = dict.fromkeys(dropped, 1)
    sizes |= {REPLICAS: ranks // shard, FILL: -1}
    if "tp" in dropped:
        sizes["async_tp"] = False
    pipeline = as_planned(config.pipeline) if "pp" in dropped else config.pipeline
    size = math.gcd(
        plan.microbatch_size, plan.global_batch_size // (ranks * product(kept, "samples"))
    )
    return replace(
        config,
        parallel=replace(config.parallel, **sizes),
        pipeline=pipeline,
        training=config.training.with_microbatches(size),
    )


def product(sizes: Mapping[str, int], role: str) -> int:
    """Product of the sizes of the axes with a role."""
    return math.prod(size for axis, size in sizes.items() if axis in axes(role))


def word(value: object) -> str:
    """A value as the command line takes it."""
    return value if value and isinstance(value, str) else show(value)


def flags(config: JobConfig, simpler: JobConfig) -> str:
    """The command-line keys that turn one config into the other."""
    sections = (config.parallel, simpler.parallel), (config.pipeline, simpler.pipeline)
    words = [
        f"--{own.section}.{field.name} {word(getattr(other, field.name))}"
        for own, other in sections
        for field in fields(own)
        if getattr(other, field.name) != getattr(own, field.name)
    ]
    size = simpler.training.microbatch_size
    if size != config.training.microbatch_size:
        words.append(f"--training.microbatch_size {size}")
    return " ".join(words)
