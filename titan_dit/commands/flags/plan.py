"""Flags of `plan`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated

import tyro

from titan_dit.config import config_file
from titan_dit.config.section import (
    Bound,
    FilePath,
    FromHome,
    OutputPath,
    PositiveInt,
    RunPath,
    Section,
    UserError,
)


@dataclass(frozen=True, kw_only=True)
class Options(Section):
    """Plan a run without a GPU: step time, memory and the best layout (docs/planner.md).

    Every key of the config is a flag, too: --parallel.tp 4 is --fix parallel.tp=4.
    """

    section = "plan"

    config: FilePath = ""
    """Config to plan for."""
    gpus: Annotated[int, Bound(least=0, most=10**6)] = 0
    """GPUs to plan for."""
    device: FilePath = ""
    """A device of titan_dit/planner/hardware, such as h100, or the path of a .toml file."""
    fix: Annotated[tuple[tuple[str, ...], ...], tyro.conf.UseAppendAction] = ()
    """section.key=value ...: keep these keys at their values. May be repeated."""
    top: PositiveInt = 10
    """Layouts to print, one for each mesh."""
    out: OutputPath | None = None
    """FILE.json for all of it; with --calibrate FILE.toml, the device."""
    write: OutputPath | None = None
    """FILE.toml for a config with the recommended layout."""
    run: RunPath | None = None
    """Run directory: set the plan for --device beside what it measured."""
    calibrate: tuple[RunPath, ...] = ()
    """gpu.json RUN ...: fit a device to a JSON of benchmarks/gpu.py and to runs, and write it to
    --out FILE.toml."""
    trust: bool = False
    """Import modules that the run's config names, such as a model of your own: their code runs."""

    def derived(self) -> Iterator[tuple[str, str, FromHome]]:
        """The file that --config is found as."""
        with suppress(UserError):  # `plan` reports it.
            if self.config:
                yield "config", str(config_file.find_config(self.config)), FromHome()
