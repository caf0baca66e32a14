"""Flags of `checkpoint list`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from titan_dit.config.section import RunPath, Section


@dataclass(frozen=True, kw_only=True)
class Options(Section):
    """List the checkpoints of a run, oldest first. Checks file sizes, but no contents."""

    section = "checkpoint list"

    run: Annotated[RunPath, tyro.conf.Positional]
    """Run directory, its checkpoints folder, or one checkpoint; a path or a URL."""
