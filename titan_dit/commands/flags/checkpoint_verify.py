"""Flags of `checkpoint verify`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from titan_dit.config.section import RunPath, Section


@dataclass(frozen=True, kw_only=True)
class Options(Section):
    """Check every file against the size and SHA-256 in the checkpoint's manifest."""

    section = "checkpoint verify"

    path: Annotated[RunPath, tyro.conf.Positional]
    """Run directory or its checkpoints folder (all of them), or one checkpoint; a path or URL."""
