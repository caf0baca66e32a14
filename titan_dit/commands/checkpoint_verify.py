"""`python -m titan_dit checkpoint verify DIR`: check every file's size and SHA-256."""

from __future__ import annotations

import math
import sys

from titan_dit.checkpoint import run_checkpoints
from titan_dit.checkpoint.checkpoint import damaged_files
from titan_dit.checkpoint.store import Location, location
from titan_dit.commands.flags import CheckpointVerifyFlags
from titan_dit.observe import console
from titan_dit.ranks.process_group import Ranks
from titan_dit.recovery.resume import own_newest_first, readable
from titan_dit.system.progress import ProgressLine, count


def main(options: CheckpointVerifyFlags) -> None:
    """Print one line per checkpoint; exit with 1 if any is damaged."""
    found = run_checkpoints.resolve(location(options.path))
    alone = [found.checkpoint] if found.checkpoint else []
    paths = alone or own_newest_first(found.checkpoints)[::-1]
    if not paths:
        raise found.none_found("checkpoint verify")
    progress = ProgressLine(sum(map(size_of, paths)), "B", what="verified", form=count)
    reports = [(path, *examine(path, progress)) for path in paths]
    progress.end()
    for path, what, size in reports:
        console.say(f"{path}: {f'damaged: {what}' if what else f'whole, {size}'}")
    if any(what for _, what, _ in reports):
        sys.exit(1)


def size_of(path: Location) -> int:
    """Bytes of the files that a checkpoint's manifest lists."""
    return sum(entry["bytes"] for entry in readable(path)[0].get("files", {}).values())


def examine(path: Location, progress: ProgressLine) -> tuple[str, str]:
    """Return (the damaged files as text, "" if none; the checkpoint's size as text)."""
    record, what = readable(path)
    if what:
        return what, ""
    entries = record["files"].values()
    mib = sum(entry["bytes"] for entry in entries) / 2**20
    damaged = damaged_files(path, record, Ranks(), progress.add, largest=math.inf)
    return ", ".join(damaged), f"{len(entries)} files, {mib:,.1f} MiB"
