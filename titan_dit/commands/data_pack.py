"""`python -m titan_dit data pack`: pack a folder of latents or images into shards."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from titan_dit.commands.flags import DataPackFlags
from titan_dit.config import user_text
from titan_dit.config.section import UserError, few
from titan_dit.data.manifest import read_json
from titan_dit.data.packing import pack
from titan_dit.data.packing.output import DROPPED, classes_without_samples, num_converted
from titan_dit.data.packing.pack import PackJob
from titan_dit.observe import console
from titan_dit.system.progress import ProgressLine


def main(options: DataPackFlags) -> None:
    """Plan and write the shards, and print a summary."""
    source, output = Path(options.input), Path(options.out)
    plan = pack.make_job(
        source,
        output,
        dtype=options.dtype,
        scale=options.scale,
        shift=options.shift,
        num_classes=options.num_classes,
        classes=read_classes(options.classes, PackJob.command),
        image_size=options.image_size,
        shard_size=options.shard_size,
        text=options.source,
        max_pixels=options.max_pixels,
    )
    total = len(plan.listing.names)
    console.say(
        f"packing {total:,} files of {plan.listing.num_classes:,} classes into {plan.num_chunks:,} "
        f"shards of {plan.dtype} {list(plan.shape)}, {options.workers} workers"
    )
    progress = ProgressLine(total, "files", resumes=True)

    def report(done: int, dropped: int) -> None:
        progress(done, f"dropped {dropped:,}" if dropped else "")

    try:
        dropped = pack.pack(plan, output, options.workers, report, options.verify)
    finally:
        progress.end()
    if dropped is None:
        console.say(f"{output} is already packed")
        if num := read_json(output)["dropped"]:
            console.say(
                f"{num:,} files were dropped ({output / DROPPED}); delete {output} to pack again"
            )
        return
    for line in summary([reason for _, reason in dropped]):
        console.say(line)
    if dropped:
        console.say(f"dropped files are listed in {output / DROPPED}")
    if emptied := classes_without_samples(plan, dropped):
        console.say(f"warning: all samples of these classes were dropped: {few(emptied)}")
    if num := num_converted(output):
        console.say(f"converted the colours of {num:,} pictures to sRGB, by their ICC profiles")
    console.say(f"wrote {total - len(dropped):,} samples to {output}")


def summary(reasons: list[str]) -> list[str]:
    """Count the dropped files by reason, ignoring numbers and brackets in it."""
    kinds: dict[str, list[str]] = {}
    for reason in reasons:
        kind = (
            "wrong shape" if reason.startswith("shape ") else re.sub(r"[(\[].*|\d+ ?", "", reason)
        )
        kinds.setdefault(kind, []).append(reason)
    lines = []
    for kind, alike in sorted(kinds.items(), key=lambda item: -len(item[1])):
        several = kind == "wrong shape" or len(set(alike)) > 1
        words = f"{kind.strip()}, e.g. {alike[0]}" if several else alike[0]
        lines.append(f"dropped {len(alike):,}: {words}")
    return lines


def read_classes(path: str | None, command: str) -> tuple[str, ...] | None:
    """Read class names from a text file, one per line; `command` for messages.

    Raises UserError for a repeated name, or without any.
    """
    if path is None:
        return None
    lines = user_text.read(Path(path), f"[{command}] classes={path}").splitlines()
    names = [line.strip() for line in lines if line.strip()]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if not names or twice:
        fault = f"{twice[0]} is listed twice" if twice else "no class names found"
        raise UserError(
            f"[{command}] classes={path}: {fault}. List every class once, one per line."
        )
    return tuple(names)
