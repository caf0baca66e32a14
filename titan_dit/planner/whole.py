"""A whole fake step of the pipeline rank that needs most: what a search's choice is checked with.

`take_fake_step` runs every pipeline rank, which takes minutes with many stages. One of them, the
fullest by the composed memory, decides whether a layout fits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from titan_dit.config.job import JobConfig
from titan_dit.data.base import Field
from titan_dit.dry_run.command import of_data
from titan_dit.dry_run.fake_step import (
    FakeRank,
    chunks_of_a_device,
    fake_world,
    take_fake_step,
    with_activations,
)
from titan_dit.dry_run.memory import Peak
from titan_dit.dry_run.pipeline import growth_of, microbatches_to_run
from titan_dit.objectives.base import Objective
from titan_dit.parallel.mesh import Mesh
from titan_dit.plan import RunPlan
from titan_dit.planner.inputs import fake_tensors


@dataclass(frozen=True)
class Parts:
    """What a fake step takes of a config, whatever the layout."""

    config: JobConfig
    objective: Objective
    fields: Mapping[str, Field]


def parts_of(config: JobConfig) -> Parts:
    """The objective and the fields of the data; the data need not be there."""
    facts, fields = config.objective.example(config.model) or of_data(config.data)
    return Parts(config, config.objective.build(config.model, facts), fields)


def peak_of(plan: RunPlan, parts: Parts, rank: int) -> Peak:
    """The peak memory of pipeline rank `rank` in a whole fake step."""
    config = parts.config
    sections = config.training, config.optimizer, config.ema
    if plan.sizes.pp == 1:
        report = take_fake_step(plan, parts.objective, parts.fields, *sections)
        return report.ranks[0].peak
    # As in `take_fake_step`.
    attention: Literal["math", "auto"]
    attention = "math" if plan.precision.attention == "math" else "auto"
    own = replace(
        plan,
        compile=replace(plan.compile, enabled=False),
        initial_weights="generator",
        precision=replace(plan.precision, attention=attention),
    )
    count = own.num_microbatches
    fewer, enough = microbatches_to_run(own, count)
    growth = growth_of(plan, enough, count)[rank]
    mode = fake_tensors()
    first = rank * (own.world_size // own.sizes.pp)
    with fake_world(first, own.world_size), chunks_of_a_device():
        mesh = Mesh(own.sizes, "cpu")
        fake = FakeRank(own, parts.objective, parts.fields, mesh, mode, sections)
        peak, _ = fake.run(own.samples_per_rank, own.microbatch_size, fewer, enough, count)
    return with_activations(peak, growth)
