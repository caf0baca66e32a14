"""`python -m titan_dit checkpoint verify DIR`: check every file's size and SHA-256."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated

import tyro

from titan_dit.checkpoint.checkpoint import damaged_files
from titan_dit.checkpoint.store import MANIFEST, Location, location, store_of
from titan_dit.config.section import Section, UserError
from titan_dit.launcher.ranks import Ranks
from titan_dit.observe import console
from titan_dit.recovery.resume import own_newest_first, readable
from titan_dit.trained_model import checkpoints_in


@dataclass(frozen=True, kw_only=True)
class Options(Section):
    """Check every file against the size and SHA-256 in the checkpoint's manifest."""

    section = "checkpoint verify"

    path: Annotated[str, tyro.conf.Positional]
    """A checkpoint, or a run directory for all its checkpoints; a path or a URL."""


def main(options: Options) -> None:
    """Print one line per checkpoint; exit with 1 if any is damaged."""
    where = location(options.path)
    alone = store_of(where).has(where / MANIFEST)
    paths = [where] if alone else own_newest_first(checkpoints_in(where))[::-1]
    if not paths:
        raise UserError(f"{where}: no checkpoint found. Give a run directory or a checkpoint.")
    reports = [(path, *examine(path)) for path in paths]
    for path, what, size in reports:
        console.say(f"{path}: {f'damaged: {what}' if what else f'whole, {size}'}")
    if any(what for _, what, _ in reports):
        sys.exit(1)


def examine(path: Location) -> tuple[str, str]:
    """Return what is damaged ("" if nothing), and the checkpoint's size as text."""
    record, what = readable(path)
    if what:
        return what, ""
    entries = record["files"].values()
    mib = sum(entry["bytes"] for entry in entries) / 2**20
    damaged = damaged_files(path, record, Ranks())
    return ", ".join(damaged), f"{len(entries)} files, {mib:,.1f} MiB"
