"""A whole fake step of the pipeline rank that needs most: what a search's choice is checked with.

A step of every pipeline rank takes minutes with many stages. One of them, the fullest by the
composed memory, decides whether a layout fits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from titan_dit.config.job import JobConfig
from titan_dit.data.base import DataFacts, Field
from titan_dit.dry_run.command import of_data
from titan_dit.dry_run.fake_step import take_fake_step
from titan_dit.dry_run.memory import Peak
from titan_dit.objectives.base import Objective
from titan_dit.plan import RunPlan


@dataclass(frozen=True)
class Parts:
    """What a fake step takes of a config, whatever the layout."""

    config: JobConfig
    facts: DataFacts
    fields: Mapping[str, Field]

    def objective(self) -> Objective:
        """A new one: a step places its modules."""
        return self.config.objective.build(self.config.model, self.facts)


def parts_of(config: JobConfig) -> Parts:
    """The objective and the fields of the data; the data need not be there."""
    facts, fields = config.objective.example(config.model) or of_data(config.data)
    return Parts(config, facts, fields)


def peak_of(parts: Parts, plan: RunPlan, rank: int) -> Peak:
    """The peak memory of pipeline rank `rank` in a whole fake step."""
    config = parts.config
    sections = config.training, config.optimizer, config.ema
    found = take_fake_step(plan, parts.objective(), parts.fields, *sections, ranks=(rank,))
    return found.ranks[0].peak
