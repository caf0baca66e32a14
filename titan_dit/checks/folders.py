"""Refuses a run whose folder is part of its data, or holds its data among its own files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from titan_dit.config.job import JobConfig
from titan_dit.config.section import UserError, paths_of

OWN = ("checkpoints", "snapshots", "profile", "samples-seen")
"""Folders of a run."""


def check_folders(config: JobConfig) -> None:
    """Raise UserError if what a run writes would change what it reads."""
    for key, folder in written(config):
        made = Path(os.path.realpath(folder))
        for name, source in read(config):
            data = Path(os.path.realpath(source))
            if data == made or data in made.parents:
                how = "is" if data == made else "lies in"
            elif made in data.parents and data.relative_to(made).parts[0] in OWN:
                how = "holds, among its own files,"
            else:
                continue
            raise UserError(
                f"{key}={folder} {how} the data {name}={source}, so the run's files would become "
                "part of it. Choose another --job.dir."
            )


def written(config: JobConfig) -> Iterator[tuple[str, str]]:
    """Yield (key, folder) of what a run writes."""
    yield "[job] dir", str(config.job.folder)
    if config.checkpoint.dir and "://" not in config.checkpoint.dir:
        yield "[checkpoint] dir", config.checkpoint.dir


def read(config: JobConfig) -> Iterator[tuple[str, str]]:
    """Yield (key, folder) of the data that a run reads."""
    for section in (config.data, config.validation, config.fid):
        for name, path, _ in paths_of(section):
            if os.path.isdir(path):  # noqa: PTH112 - of a prefix or a URL it is False.
                yield f"[{section.section}] {name}", path
