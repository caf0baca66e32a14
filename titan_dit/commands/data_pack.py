"""`python -m titan_dit data pack`: pack a folder of latents or images into shards."""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from titan_dit.config.section import FilePath, Finite, PositiveInt, Section, UserError
from titan_dit.data.class_labels import few
from titan_dit.data.manifest import read_json
from titan_dit.data.packing import pack
from titan_dit.observe import console
from titan_dit.system.progress import ProgressLine


@dataclass(frozen=True, kw_only=True)
class Options(Section):
    """Pack a folder per class, or fast-DiT's features and labels, into shards."""

    section = "data pack"

    input: FilePath
    """Folder of latents (.npy, .pt, .safetensors) or, for pixel models, of images."""
    output: FilePath
    """New folder for the shards, which take its name. Interrupted packing resumes."""
    workers: PositiveInt = field(default_factory=lambda: min(16, len(os.sched_getaffinity(0))))
    """Worker processes; the result does not depend on them."""
    dtype: Literal["float16", "float32"] | None = None
    """Dtype of stored latents. Default: float16. Images are uint8."""
    scale: Finite | None = None
    """The model's input is (stored - shift) * scale. Default: the input manifest's, else 1; 1/127.5
    for images."""
    shift: Finite | None = None
    """Default: the input manifest's, else 0; 127.5 for images."""
    num_classes: PositiveInt | None = None
    """Number of classes, if the input lacks some. Default: as found."""
    classes: str | None = None
    """Text file of the class folder names in label order, one per line."""
    image_size: PositiveInt | None = None
    """Resize and center-crop images to squares of this many pixels, like ADM and DiT."""
    source: str | None = None
    """Description of the data's origin, for the manifest."""
    shard_size: PositiveInt | None = None
    """Samples per shard. Default: 128 MiB."""


def main(options: Options) -> None:
    """Plan and write the shards, and print a summary."""
    source, output = Path(options.input), Path(options.output)
    plan = pack.make_plan(
        source,
        output,
        dtype=options.dtype,
        scale=options.scale,
        shift=options.shift,
        num_classes=options.num_classes,
        classes=read_classes(options.classes),
        image_size=options.image_size,
        shard_size=options.shard_size,
        text=options.source,
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
        dropped = pack.pack(plan, output, options.workers, report)
    finally:
        progress.end()
    if dropped is None:
        console.say(f"{output} is already packed")
        if num := read_json(output)["dropped"]:
            console.say(
                f"{num:,} files were dropped ({output / pack.DROPPED}); delete {output} to pack "
                "again"
            )
        return
    for line in summary([reason for _, reason in dropped]):
        console.say(line)
    if dropped:
        console.say(f"dropped files are listed in {output / pack.DROPPED}")
    if emptied := pack.classes_without_samples(plan, dropped):
        console.say(f"warning: all samples of these classes were dropped: {few(emptied)}")
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


def read_classes(path: str | None) -> tuple[str, ...] | None:
    """Read class names from a text file, one per line."""
    if path is None:
        return None
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise UserError(
            f"[data pack] classes={path} is not UTF-8 text. Save it as UTF-8."
        ) from None
    names = [line.strip() for line in lines if line.strip()]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if not names or twice:
        fault = f"{twice[0]} is listed twice" if twice else "no class names found"
        raise UserError(
            f"[data pack] classes={path}: {fault}. List every class once, one per line."
        )
    return tuple(names)
