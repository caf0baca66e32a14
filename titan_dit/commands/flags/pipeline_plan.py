"""Flags of `pipeline plan`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from titan_dit.config.section import Bound, OutputPath, RunPath, Section

COMMAND = "pipeline plan"


@dataclass(frozen=True, kw_only=True)
class Options(Section):
    """Plan a run's pipeline order from its measured actions and links (docs/pipelines.md)."""

    section = COMMAND

    run: RunPath
    """Run directory with a profile of its pipeline, made with --profile.enabled true."""
    out: OutputPath
    """New FILE.csv: the actions of each rank, for --pipeline.order."""
    memory: Annotated[float, Bound(least=1, most=1e6)] = 1.0
    """Activations that a rank may hold, in units of the schedule's peak."""
    trust: bool = False
    """Import modules that the run's config names, such as a model of your own: their code runs."""
