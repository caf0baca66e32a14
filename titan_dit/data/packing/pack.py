"""Pack folders of latents or images into shards: parallel and resumable.

The listing is split into fixed chunks, one shard each, so the output does not depend on the number
of workers or restarts. The manifest is written last; until then `pack.json` marks the output.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor

from titan_dit.config import user_text
from titan_dit.config.section import UserError
from titan_dit.data.files import BadFileError, read_latent
from titan_dit.data.latents import STORED_DTYPES
from titan_dit.data.listing import Listing, list_folder
from titan_dit.data.manifest import (
    CLAIM,
    MANIFEST,
    agreed,
    check_manifest,
    read_folder_manifest,
    read_json,
    write_json,
)
from titan_dit.data.packing import sources
from titan_dit.data.packing.claim import claimed
from titan_dit.data.packing.images import DecodingBudget, read_image
from titan_dit.data.packing.shard_job import (
    CONVERTED,
    MAX_PIXELS_FLAG,
    ChunkRecord,
    PackPlan,
    ShardPlan,
    read_record,
    writing,
)
from titan_dit.data.packing.sources import SOURCES
from titan_dit.data.packing.workers import Progress, pack_here, run_workers

DROPPED, CAPTIONS = "dropped.json", "captions.jsonl"
SHARD_BYTES = 128 << 20
SHARD_FILES = r"-\d{5,}\.(safetensors|json)"
TEMPORARY = r"\.tmp\w{6}"
"""Temporary files of a killed earlier version."""


def make_plan(
    source: Path,
    output: Path,
    *,
    dtype: str | None = None,
    scale: float | None = None,
    shift: float | None = None,
    num_classes: int | None = None,
    classes: Sequence[str] | None = None,
    image_size: int | None = None,
    shard_size: int | None = None,
    text: str | None = None,
    max_pixels: int | None = None,
) -> PackPlan:
    """List a folder and plan its shards."""
    listing, stated = list_folder(source, num_classes, classes), read_folder_manifest(source)
    pictures = listing.kind == "images"
    if pictures and dtype:
        raise UserError(f"[data pack] dtype={dtype}: images are stored as uint8. Omit --dtype.")
    if image_size and not pictures:
        raise UserError(
            f"[data pack] image_size={image_size}: {source} holds latents, not images. Omit it."
        )
    dtype = "uint8" if pictures else dtype or "float16"
    shape = shape_of_most(listing, image_size, max_pixels)
    about = {
        "source": text or stated["source"] or f"packed from {source.resolve().name}",
        "num_classes": listing.num_classes,
        **({"classes": list(listing.class_names)} if listing.class_names else {}),
        "scale": agreed("scale", scale, stated["scale"], 1 / 127.5 if pictures else 1.0, source),
        "shift": agreed("shift", shift, stated["shift"], 127.5 if pictures else 0.0, source),
        "value_range": [0.0, 255.0] if pictures else None,
    }
    bytes_each = math.prod(shape) * STORED_DTYPES[dtype].itemsize
    size = shard_size or max(1, SHARD_BYTES // bytes_each)
    return PackPlan(
        listing,
        output.resolve().name,
        shape,
        dtype,
        image_size,
        about,
        max_pixels,
        shard_size=size,
    )


def shape_of_most(
    listing: Listing, image_size: int | None, max_pixels: int | None, num: int = 64
) -> tuple[int, int, int]:
    """Return the most frequent shape of up to `num` evenly spaced files."""
    num = min(num, len(listing.names))
    shapes: Counter[tuple[int, int, int]] = Counter()
    first_error = ""
    budget = DecodingBudget(max_pixels, flag=MAX_PIXELS_FLAG)
    for row in (i * len(listing.names) // num for i in range(num)):
        path = listing.root / listing.names[row]
        try:
            c, h, w = read_sample(listing, path, image_size, budget).shape
            shapes[c, h, w] += 1
        except BadFileError as error:
            first_error = first_error or f"{path}: {error}"
    if not shapes:
        raise UserError(
            f"[data pack] none of {num} sampled files of {listing.root} can be packed; the first "
            f"is {first_error}."
        )
    sizes = {(h, w) for _, h, w in shapes}
    if (
        listing.kind == "images"
        and not image_size
        and (len(sizes) > 1 or any(h != w for h, w in sizes))
    ):
        found = ", ".join(f"{w}x{h}" for h, w in sorted(sizes)[:4])
        raise UserError(
            f"[data pack] the images of {listing.root} are not squares of one size ({found}). "
            "Resize and crop them to the model's size, such as --image-size 64."
        )
    return shapes.most_common(1)[0][0]


def read_sample(
    listing: Listing, path: Path, image_size: int | None, budget: DecodingBudget
) -> Shaped[Tensor, "c h w"]:
    """Read a file of the listing, of any shape."""
    if listing.kind == "images":
        return read_image(path, image_size, budget=budget)
    return read_latent(path)


def pack(
    plan: PackPlan, output: Path, workers: int, progress: Progress, verify: bool = False
) -> list[tuple[int, str]] | None:
    """Write the shards and the manifest; return the dropped files, or None if already packed.

    `verify` compares the contents of files that were packed before.
    """
    check_output(plan, output)
    digest = plan.digest()
    output.mkdir(parents=True, exist_ok=True)
    with claimed(output, digest):
        finished = resumed(plan, output, digest, verify)
        if finished is None:
            return None
        todo = [chunk for chunk in range(plan.num_chunks) if chunk not in finished]
        done = sum(len(plan.rows(chunk)) for chunk in finished)
        dropped = sum(len(record.dropped) for record in finished.values())

        def report(newly_done: int, newly_dropped: int) -> None:
            progress(done + newly_done, dropped + newly_dropped)

        if min(workers, len(todo)) > 1:
            run_workers(plan, output, todo, min(workers, len(todo)), report)
        else:
            pack_here(plan, output, todo, report)
        records = all_finished(plan, output, digest)
        with writing(output / MANIFEST):
            write_all(plan, output, digest, records)
    return [drop for record in records for drop in record.dropped]


def resumed(
    plan: ShardPlan, output: Path, digest: str, verify: bool
) -> dict[int, ChunkRecord] | None:
    """The chunks that need no work; None if the output is whole.

    Raises UserError if the files that they were made of have changed; `verify` compares contents.
    """
    manifest = read_json(output)
    if manifest.get("plan") == digest:
        records = records_of(plan, output, digest, manifest)
        if all(has_size(output, shard["file"], shard["bytes"]) for shard in manifest["shards"]):
            try:
                sources.check(plan, output, digest, records, verify)
            finally:
                clean(plan, output)  # Also of an error: the output is whole, and not claimed.
            return None
        for chunk, record in records.items():
            write_json(output / f"{plan.name}-{chunk:05d}.json", asdict(record))
        (output / MANIFEST).unlink()
    found = find_finished(plan, output, digest)
    sources.check(plan, output, digest, found, verify)
    return found


def all_finished(plan: ShardPlan, output: Path, digest: str) -> list[ChunkRecord]:
    """The records of all chunks; UserError if one is missing, or all files were dropped."""
    sources.check_unchanged(plan, output, digest)
    records = list(find_finished(plan, output, digest).values())
    if len(records) != plan.num_chunks:
        raise UserError(
            f"[{plan.command}] another process changed {output} during packing. Run the command "
            "again."
        )
    if not any(record.count for record in records):
        clean(plan, output, all_of_it=True)
        row, reason = records[0].dropped[0]
        raise UserError(
            f"[{plan.command}] none of the {len(plan.names):,} files can be packed; the first is "
            f"{plan.root / plan.names[row]}: {reason}. Nothing was written."
        )
    return records


def num_converted(output: Path) -> int:
    """Pictures of a whole output whose colours were converted to sRGB."""
    shards = read_json(output)["shards"]
    return sum(int(shard.get("extra", {}).get(CONVERTED, 0)) for shard in shards)


def check_output(plan: ShardPlan, output: Path) -> None:
    """Refuse an output that is inside the input, or holds anything but this plan's files."""
    root = plan.root.resolve()
    if output.resolve() == root or root in output.resolve().parents:
        raise UserError(
            f"[{plan.command}] output={output} is inside the input {plan.root}, so the shards "
            "would become part of it. Choose another --output."
        )
    if not output.exists():
        return
    if not output.is_dir():
        raise UserError(f"[{plan.command}] output={output} is a file. Choose another --output.")
    stated = read_json(output)
    if stated and stated.get("plan") != plan.digest():
        raise UserError(
            f"[{plan.command}] output={output} holds another dataset. Delete it or choose another "
            "--output."
        )
    written = f"{CLAIM}|{DROPPED}|{MANIFEST}|{SOURCES}|{re.escape(CAPTIONS)}"
    known = rf"({re.escape(plan.name)}{SHARD_FILES}|{written})(\.partial)?"
    if stated or (output / CLAIM).is_file():
        known += f"|{TEMPORARY}"
    strange = [path.name for path in output.iterdir() if not re.fullmatch(known, path.name)]
    if strange:
        raise UserError(
            f"[{plan.command}] output={output} is not empty: it holds {sorted(strange)[0]}. Choose "
            "another --output."
        )
    if any(output.glob(f"{plan.name}-*")) and not stated and not (output / CLAIM).is_file():
        raise UserError(
            f"[{plan.command}] output={output} holds shards of unknown origin, without a "
            f"{MANIFEST}. Delete it or choose another --output."
        )


def has_size(output: Path, file: str, size: int) -> bool:
    """Return True if a shard exists with the expected size."""
    return (output / file).is_file() and (output / file).stat().st_size == size


def records_of(
    plan: ShardPlan, output: Path, digest: str, manifest: dict[str, Any]
) -> dict[int, ChunkRecord]:
    """The records of the chunks of a whole dataset, by its manifest.

    A chunk has none, and is packed again, if the list of its dropped files is lost.
    """
    reasons = reasons_of(output / DROPPED, len(plan.names))
    rows = enumerate(plan.names) if reasons else ()
    dropped = {row: reasons[name] for row, name in rows if name in reasons}
    shards = {shard["file"]: shard for shard in manifest["shards"]}
    records = {}
    for chunk in range(plan.num_chunks):
        stem = f"{plan.name}-{chunk:05d}"
        lost = [(row, dropped[row]) for row in plan.rows(chunk) if row in dropped]
        shard = shards.get(f"{stem}.safetensors", {"file": "", "count": 0, "bytes": 0})
        if shard["count"] // plan.copies + len(lost) == len(plan.rows(chunk)):
            records[chunk] = ChunkRecord(digest, **({"sha256": ""} | shard), dropped=lost)
    return records


def reasons_of(report: Path, rows: int) -> dict[str, str]:
    """Why files were dropped, by name; {} if the list is lost. UserError if it is damaged."""
    if not report.is_file():
        return {}
    # Of a hundred million pictures it may be gigabytes.
    drops = user_text.read_json(report, str(report), user_text.MAX_BYTES + 1024 * rows)
    try:
        return {str(entry["file"]): str(entry["reason"]) for entry in drops}
    except (LookupError, TypeError):
        raise UserError(
            f"{report} is no list of dropped files. Delete it: their shards are made again."
        ) from None


def find_finished(plan: ShardPlan, output: Path, digest: str) -> dict[int, ChunkRecord]:
    """Return the records of finished chunks, from this run or an earlier one."""
    found = {}
    for chunk in range(plan.num_chunks):
        record = read_record(output, f"{plan.name}-{chunk:05d}")
        if record and record.plan == digest:
            found[chunk] = record
    return found


def write_all(
    plan: ShardPlan,
    output: Path,
    digest: str,
    records: list[ChunkRecord],
    more: dict[str, Any] | None = None,
) -> None:
    """Write the list of dropped files, then the manifest; then delete the chunk records.

    `more`: keys of the manifest that are known at the end only.
    """
    names = plan.names
    dropped = [
        {"file": names[row], "reason": reason}
        for record in records
        for row, reason in record.dropped
    ]
    if dropped:
        write_json(output / DROPPED, dropped)
    keys = ("file", "count", "bytes", "sha256")
    shards = [
        {key: getattr(record, key) for key in keys}
        | ({"extra": record.extra} if record.extra else {})
        for record in records
        if record.file
    ]
    manifest: dict[str, Any] = {
        "format": plan.format,
        **plan.about,
        **(more or {}),
        "shape": list(plan.shape),
        "dtype": plan.dtype,
        "count": sum(record.count for record in records),
        "dropped": len(dropped),
        "plan": digest,
        "shards": shards,
    }
    check_manifest(manifest, output / MANIFEST)  # The check of opening a dataset.
    write_json(output / MANIFEST, manifest)
    clean(plan, output)


def clean(plan: ShardPlan, output: Path, all_of_it: bool = False) -> None:
    """Delete the files kept for resuming; with `all_of_it`, also the shards and the folder."""
    endings = "json|safetensors" if all_of_it else "json"
    leftover = (
        rf"{re.escape(plan.name)}-\d{{5,}}\.({endings})|.*\.partial|{re.escape(CLAIM)}|{TEMPORARY}"
    )
    if all_of_it:
        leftover += f"|{SOURCES}"
    # pack.json last: shards without it are refused.
    for path in sorted(output.iterdir(), key=lambda path: path.name == CLAIM):
        if re.fullmatch(leftover, path.name):
            path.unlink()
    if all_of_it:
        with suppress(OSError):  # Not empty: it holds files of the user.
            output.rmdir()


def classes_without_samples(plan: ShardPlan, dropped: list[tuple[int, str]]) -> list[int]:
    """Return the classes whose files were all dropped."""
    labels = plan.labels
    kept = torch.ones(len(labels), dtype=torch.bool)
    kept[[row for row, _ in dropped]] = False
    had, left = (set(np.unique(some).tolist()) for some in (labels[labels >= 0], labels[kept]))
    return sorted(had - left)
