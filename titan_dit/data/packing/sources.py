"""Whether the files that shards were made of have changed since: `sources.json` beside the shards.

It holds a digest of lengths and times of modification for each chunk. Contents are compared on
request, by what the records of the chunks hold.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path

from titan_dit.config import user_text
from titan_dit.config.section import UserError
from titan_dit.data.class_labels import few
from titan_dit.data.manifest import write_json
from titan_dit.data.packing.shard_job import ChunkRecord, ShardPlan, writing
from titan_dit.system import stdio

SOURCES = "sources.json"


def stamps_of(plan: ShardPlan) -> list[str]:
    """A digest of the lengths and times of modification of each chunk's files."""
    return [
        hashlib.sha256(
            " ".join(f"{plan.stamp(row)}" for row in plan.rows(chunk)).encode()
        ).hexdigest()[:32]
        for chunk in range(plan.num_chunks)
    ]


def check(
    plan: ShardPlan, output: Path, digest: str, made: Mapping[int, ChunkRecord], verify: bool
) -> None:
    """Raise UserError if the files of finished chunks have changed; else record how they are.

    `verify` reads and compares the contents.
    """
    now, before = stamps_of(plan), recorded(plan, output, digest)
    unknown = [chunk for chunk in made if before[chunk] is None]
    if verify:
        changed = [chunk for chunk, record in made.items() if not plan.has_made(record, chunk)]
        how, compare = "contents", ""
    else:
        changed = [chunk for chunk in made if before[chunk] not in (None, now[chunk])]
        how = "length or time of modification"
        compare = " If they are the same, --verify true compares their contents."
    if changed:
        names = few([f"{plan.name}-{chunk:05d}" for chunk in changed])
        raise UserError(
            f"[{plan.command}] input={plan.root}: files have changed ({how}) since these shards of "
            f"{output} were made of them: {names}. Delete {output}, or choose another --output."
            f"{compare}"
        )
    if unknown and not verify:
        stdio.write(
            sys.stderr,
            f"whether the files of {plan.root} have changed is not known: an earlier version wrote "
            f"{output}. --verify true compares their contents\n",
        )
    kept = {} if verify else dict.fromkeys(unknown)
    chunks = [kept.get(chunk, stamp) for chunk, stamp in enumerate(now)]
    if chunks != before:
        with writing(output / SOURCES, plan.command):
            write_json(output / SOURCES, {"plan": digest, "chunks": chunks})


def check_unchanged(plan: ShardPlan, output: Path, digest: str) -> None:
    """Raise UserError if files have changed while they were read."""
    pairs = zip(recorded(plan, output, digest), stamps_of(plan), strict=True)
    if any(before not in (None, now) for before, now in pairs):
        raise UserError(
            f"[{plan.command}] input={plan.root}: files have changed while they were read. Delete "
            f"{output}, and repeat the command."
        )


def recorded(plan: ShardPlan, output: Path, digest: str) -> list[str | None]:
    """The digest of each chunk that was recorded for a plan; None where it is not known."""
    file = output / SOURCES
    found = user_text.read_json(file, str(file)) if file.is_file() else None
    if isinstance(found, dict) and found.get("plan") == digest:
        chunks = found.get("chunks")
        if isinstance(chunks, list) and len(chunks) == plan.num_chunks:
            return chunks
    return [None] * plan.num_chunks
