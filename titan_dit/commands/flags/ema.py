"""Flags of `ema`."""

from __future__ import annotations

from dataclasses import dataclass

from titan_dit.config.section import NonNegativeInt, OutputPath, RunPath, Section, SigmaRel


@dataclass(frozen=True, kw_only=True)
class Options(Section):
    """Make an average of a run's weights after training, from snapshots of [ema] power."""

    section = "ema"

    run: RunPath
    """Run directory, or its checkpoints folder; a path or a URL."""
    sigma_rel: SigmaRel
    """Relative width of the average: the standard deviation of its profile over the steps."""
    to: OutputPath
    """Folder of the new checkpoint."""
    step: NonNegativeInt | None = None
    """Step at which the average ends, one of a snapshot. Unset: the newest."""
