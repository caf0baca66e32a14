"""Flags of `runs`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from titan_dit.config.section import OutputPath, RunPath, Section


@dataclass(frozen=True, kw_only=True)
class Options(Section):
    """Compare runs: a table of losses and of what differs in their configs, and a picture."""

    section = "runs"

    dirs: Annotated[tuple[RunPath, ...], tyro.conf.Positional]
    """Run directories, or folders of runs, such as outputs."""
    out: OutputPath = "runs.png"
    """PNG of the loss curves: smoothed training losses, and validation losses as dots."""
