"""Flags of `data example`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from titan_dit.config.section import OutputPath, Section


@dataclass(frozen=True, kw_only=True)
class Options(Section):
    """Write example data as a user has his: a folder of pictures for each class, with captions."""

    section = "data example"

    name: Annotated[Literal["pictures"], tyro.conf.Positional]
    """pictures: 3,786 Noto emoji of 64 x 64 pixels in ten classes."""
    out: OutputPath
    """Folder to make."""
