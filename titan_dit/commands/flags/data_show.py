"""Flags of `data show`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from titan_dit.config.section import FilePath, FromHome, OutputPath, PositiveInt, Section, Written


@dataclass(frozen=True, kw_only=True)
class Options(Section):
    """Print a dataset's metadata and a few of its samples: pictures are drawn, tokens printed."""

    section = "data show"

    path: Annotated[FilePath, tyro.conf.Positional]
    """Dataset folder (shards, a folder per class, or features and labels), or a .bin or .idx of
    tokens."""
    num: PositiveInt = 16
    """Samples to read and draw, evenly spaced over the dataset."""
    out: OutputPath | None = None
    """PNG file. Default: NAME.png in the current folder."""
    verify: bool = False
    """Check all data: the SHA-256 of every shard, or every file of a folder. Tokens always are."""
    tokenizer: FilePath | None = None
    """Of tokens: the tokenizer.json, to print text."""

    @property
    def drawn(self) -> Path:
        """The PNG file."""
        return Path(self.out or f"{Path(os.path.realpath(self.path)).name}.png")

    def derived(self) -> Iterator[tuple[str, str, FromHome]]:
        """The picture of the default name."""
        if not self.out:
            yield "out", str(self.drawn), Written()
