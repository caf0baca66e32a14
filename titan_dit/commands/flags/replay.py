"""Flags of `replay`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from titan_dit.config.section import (
    BatchSize,
    NonNegativeInt,
    PositiveInt,
    RunPath,
    Section,
)


@dataclass(frozen=True, kw_only=True)
class Options(Section):
    """Repeat a training step and list the samples that are not finite."""

    section = "replay"

    run: Annotated[RunPath, tyro.conf.arg(aliases=["--checkpoint"])]
    """Run directory, its checkpoints folder, or one of its checkpoints."""
    step: PositiveInt
    """A step that the run took or crashed in; RUN/faults.jsonl lists the skipped ones."""
    microbatch: NonNegativeInt | None = None
    """Run only this microbatch, counted from 0. Unset: all."""
    microbatch_size: BatchSize | None = None
    """Unset: the run's [training] microbatch_size. 1 gives a gradient norm per sample."""
    show: NonNegativeInt = 20
    """Finite samples to print, highest loss first."""
    device: str | None = None
    """Default: cuda if available, else cpu."""
    trust: bool = False
    """Import modules that the run's config names, such as a model of your own: their code runs."""
