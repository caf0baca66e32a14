"""`titan_dit train --config FILE --dry-run [WORLD]`: one process for any world size."""

from __future__ import annotations

import dataclasses
import math

from titan_dit.checks.parts import check_optimizer, optimizer_lines
from titan_dit.config import dotted_names, stages
from titan_dit.config.job import JobConfig
from titan_dit.config.layout import ParallelConfig
from titan_dit.dry_run import report, simpler
from titan_dit.dry_run.fake_step import Report, take_fake_step
from titan_dit.observe import console
from titan_dit.opening import (
    bucket_lines,
    example_of,
    largest_bucket,
    open_objective,
    plan_run,
    settled_stages,
)
from titan_dit.parallel.mesh import AxisSizes
from titan_dit.plan import RunPlan


def dry_run(config: JobConfig, world_size: int | None) -> None:
    """Run a step of every stage on fake tensors; print memory, traffic and FLOPs of every rank.

    `world_size`: None for the smallest one that all stages allow.
    """
    found, training = settled_stages(config), config.training
    world_size = world_size or math.lcm(*(smallest_world(each.parallel) for each in found))
    peaks = []
    for number, each in enumerate(found):
        if training.stages:
            console.say(stages.line_of(training, number))
        with stages.naming(config, number):
            peaks.append(dry_run_stage(stages.alone(each), world_size))
    if training.stages:
        largest = peaks.index(max(peaks))
        size = f"{peaks[largest] / 2**20:,.4g} MiB on a rank"
        console.say(f"the most memory has {stages.line_of(training, largest)}: {size}")


def dry_run_stage(config: JobConfig, world_size: int) -> int:
    """The dry run of one stage; returns the peak of the fullest rank in bytes.

    The last line names a simpler layout that fits the same device, if there is one.
    """
    config = largest_bucket(config, plan_run(config, world_size))
    plan = plan_run(config, world_size)
    data = example_of(config)
    objective = open_objective(config, plan, data)
    own = {"model": config.model, "objective": config.objective, "data": config.data}
    own["optimizer"] = config.optimizer
    groups = optimizer_lines(plan, objective, config.optimizer)
    for line in (*dotted_names.origins(own), *groups):
        console.say(line)

    def take(config: JobConfig, plan: RunPlan) -> Report:
        # A new objective: a step places its modules.
        own = config.objective.build(config.model, data.facts)
        return take_fake_step(plan, own, data.fields, config.training, config.optimizer, config.ema)

    for line in bucket_lines(config, plan):
        console.say(line)
    found = take(config, plan)
    for line in report.lines(found):
        console.say(line)

    def peak_of(config: JobConfig, plan: RunPlan) -> int:
        check_optimizer(plan, objective, config.optimizer)
        return take(config, plan).peak

    for line in simpler.lines(config, plan, found.peak, peak_of):
        console.say(line)
    return found.peak


def smallest_world(parallel: ParallelConfig) -> int:
    """Smallest world size that the config allows; dp_shard=-1 counts as 1."""
    return math.prod(max(1, getattr(parallel, axis.name)) for axis in dataclasses.fields(AxisSizes))
