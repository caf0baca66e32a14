"""`python -m titan_dit checkpoint show CHECKPOINT`: print a checkpoint's metadata."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

from titan_dit.checkpoint import checkpoint
from titan_dit.checkpoint.record import read_record
from titan_dit.checkpoint.run_checkpoints import find_checkpoint
from titan_dit.checkpoint.store import location
from titan_dit.commands.checkpoint_list import epoch
from titan_dit.commands.flags import CheckpointShowFlags
from titan_dit.config.section import UserError, show
from titan_dit.observe import console


def main(options: CheckpointShowFlags) -> None:
    """Print the checkpoint."""
    path = find_checkpoint(location(options.path), options.step, "checkpoint show")
    record = read_record(path)
    if wrong := checkpoint.wrong_contents(path, record["files"]):
        raise UserError(f"[checkpoint] {path} is damaged: {wrong[0]}. Use another one.")
    tensors = checkpoint.contents(path)
    for name, value in (*position(path, record), *parts(tensors)):
        console.say(f"{name:10}{value}")
    for section, table in record["config"].items():
        console.say(f"[{section}]")
        console.say("  " + ", ".join(f"{key} = {show(value)}" for key, value in table.items()))
    if options.tensors:
        for name, (shape, dtype) in sorted(tensors.items()):
            console.say(f"{name}  {list(shape)}  {str(dtype)[6:]}")


def position(path: Any, record: dict[str, Any]) -> Iterator[tuple[str, object]]:
    """Yield (name, value) lines: path, progress, data, layout, versions."""
    data, files = record["data"], record["files"]
    yield "path", path
    yield "step", f"{record['step']:,}"
    epochs = "" if (passed := epoch(record)) == "-" else f" ({passed} epochs)"
    yield "samples", f"{record['cursor']:,}{epochs}"
    yield "skipped", f"{record.get('nan_steps', 0):,} non-finite steps"
    yield "data", f"{data['count']:,} samples, digest {data['digest'] or 'unknown'}"
    if average := record.get("averaged"):
        made = f"sigma_rel {average['sigma_rel']} of step {average['step']}"
        yield "origin", f"average of weights, {made} of {average['run']}"
    elif record.get("imported"):
        yield "origin", "imported weights"
    yield "layout", record.get("layout", "unknown")
    yield "written", record.get("written_at", "unknown")
    versions = record.get("versions", {})
    yield "versions", ", ".join(f"{name} {text}" for name, text in versions.items())
    size = sum(entry["bytes"] for entry in files.values())
    yield "files", f"{len(files)}, {size:,} bytes"


def parts(tensors: dict[str, tuple[torch.Size, torch.dtype]]) -> Iterator[tuple[str, str]]:
    """Yield the number of tensors, elements and bytes per part."""
    found: dict[str, list[tuple[int, torch.dtype]]] = defaultdict(list)
    for name, (shape, dtype) in tensors.items():
        found[name.partition(".")[0]].append((shape.numel(), dtype))
    for part, entries in sorted(found.items()):
        count = sum(number for number, _ in entries)
        size = sum(number * dtype.itemsize for number, dtype in entries)
        kinds = ", ".join(sorted({str(dtype)[6:] for _, dtype in entries}))
        yield part, f"{len(entries):,} tensors, {count:,} elements, {size:,} bytes, {kinds}"
