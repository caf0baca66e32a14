"""`python -m titan_dit checkpoint show CHECKPOINT`: what a checkpoint says of itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import tyro

from titan_dit.checkpoint import checkpoint
from titan_dit.checkpoint.store import place
from titan_dit.commands.restore import find
from titan_dit.config.section import Section, show
from titan_dit.observe import console


@dataclass(frozen=True, kw_only=True)
class Options(Section):
    """Print the position, the tensors by part, the versions and the config of a checkpoint."""

    section = "checkpoint show"

    path: Annotated[str, tyro.conf.Positional]
    """A checkpoint, or a run directory for its newest one; a path or a URL."""
    step: int | None = None
    """Which checkpoint of a run; the newest if not given."""
    tensors: bool = False
    """Every tensor by its name and shape as well."""


def main(options: Options) -> None:
    """Print."""
    path = find(place(options.path), options.step, "checkpoint show")
    record, tensors = checkpoint.read_record(path), checkpoint.contents(path)
    for name, value in (*position(path, record), *parts(tensors)):
        console.say(f"{name:10}{value}")
    for section, table in record["config"].items():
        console.say(f"[{section}]")
        console.say("  " + ", ".join(f"{key} = {show(value)}" for key, value in table.items()))
    if options.tensors:
        for name, (shape, dtype) in sorted(tensors.items()):
            console.say(f"{name}  {list(shape)}  {str(dtype)[6:]}")


def position(path: Any, record: dict[str, Any]) -> Iterator[tuple[str, object]]:
    """What it is of, and how far that had come."""
    data, files = record["data"], record["files"]
    yield "path", path
    yield "step", f"{record['step']:,}"
    epochs = f" ({record['cursor'] / data['count']:.2f} epochs)" if data["count"] else ""
    yield "samples", f"{record['cursor']:,}{epochs}"
    yield "skipped", f"{record['nan_steps']:,} steps that were not finite"
    yield "data", f"{data['count']:,} samples, digest {data['digest'] or 'not known'}"
    if record.get("imported"):
        yield "origin", "imported weights"
    yield "layout", record.get("layout", "not known")
    yield "written", record.get("written_at", "not known")
    yield "versions", ", ".join(f"{name} {text}" for name, text in record["versions"].items())
    size = sum(entry["bytes"] for entry in files.values())
    yield "files", f"{len(files)}, {size:,} bytes"


def parts(tensors: dict[str, tuple[torch.Size, torch.dtype]]) -> Iterator[tuple[str, str]]:
    """How many tensors, elements and bytes each part has."""
    found: dict[str, list[tuple[int, torch.dtype]]] = defaultdict(list)
    for name, (shape, dtype) in tensors.items():
        found[name.partition(".")[0]].append((shape.numel(), dtype))
    for part, entries in sorted(found.items()):
        count = sum(number for number, _ in entries)
        size = sum(number * dtype.itemsize for number, dtype in entries)
        kinds = ", ".join(sorted({str(dtype)[6:] for _, dtype in entries}))
        yield part, f"{len(entries):,} tensors, {count:,} elements, {size:,} bytes, {kinds}"
