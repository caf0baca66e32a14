"""`python -m titan_dit data show PATH`: print a dataset's metadata and a few samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor

from titan_dit.commands.flags import DataShowFlags
from titan_dit.config.section import UserError, few
from titan_dit.data.folders import LatentFolder
from titan_dit.data.held_out import counted
from titan_dit.data.indexed_file import IndexedFile, bin_of, idx_of
from titan_dit.data.latent_facts import LatentFacts, shown
from titan_dit.data.latents import LatentShards, open_surveyed, survey
from titan_dit.data.sections import Latents
from titan_dit.data.token_windows import PART, digest_of
from titan_dit.data.tokenizer_file import read_tokenizer
from titan_dit.data.tokenizing import tokenizer as tokenizers
from titan_dit.diffusion.objective import drawn_latents
from titan_dit.observe import console
from titan_dit.pictures.output import draw_contact_sheet, draw_grid, to_clips
from titan_dit.ranks.disk_errors import writing
from titan_dit.rng import SampleRNG
from titan_dit.system.progress import ProgressLine, count

SHOWN_IDS = 64


def prefix_of(path: Path) -> Path | None:
    """The path without .bin or .idx, if it names an indexed dataset."""
    for prefix in (path, path.with_suffix("")) if path.name else ():
        if idx_of(prefix).is_file() or bin_of(prefix).is_file():
            return prefix
    return None


def show_tokens(prefix: Path, num: int, tokenizer: str | None) -> None:
    """Print counts and the beginnings of `num` documents, evenly spaced; reads every id."""
    file = IndexedFile(prefix)
    file.check()
    counts = count_ids(file)
    there = np.flatnonzero(counts)
    documents, sequences = max(file.num_documents, 1), max(len(file), 1)
    lines = {
        "format": "Megatron's .bin and .idx",
        "dtype": file.dtype.name,
        "documents": f"{file.num_documents:,}",
        "sequences": f"{len(file):,}, {len(file) / documents:.1f} per document",
        "tokens": f"{len(file.ids):,}, {len(file.ids) / sequences:.1f} per sequence",
        "ids": f"{there[0]} to {there[-1]}, {len(there):,} different" if len(there) else "none",
        "bytes": f"{file.bin.stat().st_size:,}",
        "digest": digest_of(file),
    }
    if tokenizer:
        lines |= of_tokenizer(Path(tokenizer), counts)
    for name, value in lines.items():
        console.say(f"{name:11}{value}")
    decode = tokenizers.read(Path(tokenizer), "data show").decode if tokenizer else None
    for document in sorted({i * file.num_documents // num for i in range(num)}):
        if document < file.num_documents:
            first, end = file.tokens_of(document, document + 1)
            ids = file.ids[first : min(end, first + SHOWN_IDS)].tolist()
            text = repr(decode(ids, skip_special_tokens=False)) if decode else str(ids)
            console.say(f"  document {document:,} of {end - first:,} tokens: {text}")


def of_tokenizer(path: Path, counts: np.ndarray[tuple[int], np.dtype[np.int64]]) -> dict[str, str]:
    """Rows about the tokenizer: its size, and the bytes per token of the ids.

    Raises UserError for ids outside of it.
    """
    read = read_tokenizer(path)
    if len(counts) > read.vocabulary:
        raise UserError(
            f"[data show] tokenizer={path} has {read.vocabulary:,} tokens, but the file holds id "
            f"{len(counts) - 1}. Give the tokenizer that made the file."
        )
    sizes, end = read.token_bytes(), read.end_of_document
    text = "unknown: not a byte-level tokenizer"
    if sizes is not None:
        num_bytes = int(sizes[: len(counts)] @ counts)
        text = f"{num_bytes:,} bytes, {num_bytes / max(counts.sum(), 1):.3f} per token"
    ends = int(counts[end]) if end is not None and end < len(counts) else 0
    return {"vocabulary": f"{read.vocabulary:,}", "text": text, "ends": f"{ends:,} of id {end}"}


def count_ids(file: IndexedFile) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Count every id. Raises UserError for a negative one."""
    counts = np.zeros(0, np.int64)
    progress = ProgressLine(len(file.ids), "tokens", what="counted", form=count)
    for first in range(0, len(file.ids), PART):
        ids = file.ids[first : first + PART]
        if ids.min() < 0:
            raise UserError(
                f"[data show] {file.bin}: holds the negative id {ids.min()}. Tokenize again."
            )
        more = np.bincount(ids, minlength=len(counts))
        more[: len(counts)] += counts
        counts = more
        progress.add(len(ids))
    progress.end()
    return counts


def main(options: DataShowFlags) -> None:
    """Show tokens or latents, whichever the path holds."""
    path = Path(options.path)
    if prefix := prefix_of(path):
        if options.out:
            raise UserError(
                f"[data show] out={options.out}: tokens are printed, not drawn. Leave it out."
            )
        show_tokens(prefix, options.num, options.tokenizer)
        return
    if options.tokenizer:
        raise UserError(
            f"[data show] tokenizer={options.tokenizer}: {path} holds no tokens. Leave it out."
        )
    if not path.exists():
        raise UserError(
            f"[data show] path={path}: there is no such folder, and no .bin or .idx of tokens. "
            "Give the path of a dataset."
        )
    show_latents(path, options)


def show_latents(path: Path, options: DataShowFlags) -> None:
    """Print the metadata and draw the samples. Raises UserError for an --out inside the dataset."""
    out = options.drawn
    if path.resolve() in out.resolve().parents:
        raise UserError(
            f"[data show] out={out} is inside the dataset {path}, where it would prevent opening "
            f"it. Choose another --out, such as --out {path.resolve().parent / out.name}."
        )
    section = Latents(path=str(path), verify=options.verify)
    source = open_surveyed(section, survey(section))
    rows = rows_to_draw(source)
    num = min(options.num, len(rows))
    samples = source.read([rows[i * len(rows) // num] for i in range(num)])
    facts = source.facts
    mean_and_std = looks_like_mean_and_std(samples["latent"], facts)
    for name, value in describe(source).items():
        console.say(f"{name:9}{value}")
    if options.verify and isinstance(source, LatentShards):
        console.say(f"verified {len(source.shards)} shards: all SHA-256 match the manifest")
    elif options.verify:
        console.say(f"verified {len(source):,} files: all are readable")
    channels = facts.shape[0] // 2 if mean_and_std else facts.shape[0]
    if mean_and_std:
        console.say(f"the {2 * channels} channels look like a mean and a std of {channels}")
    latents = drawn_latents(samples["latent"], facts, channels, SampleRNG(0, torch.arange(num)))
    console.say(f"{num} samples, as the model sees them:")
    for channel in range(min(channels, 16)):
        values = latents[:, channel]
        console.say(f"  channel {channel}: mean {values.mean():+.3f}, std {values.std():.3f}")
    drawn = samples["latent"][:, :channels].float()
    with writing(f"--out {out}"):
        labels, names = samples["label"].tolist(), facts.class_names
        if facts.has_clips:
            draw_contact_sheet(out, to_clips(drawn, facts.value_range), labels, names)
        else:
            draw_grid(out, drawn, labels, facts.value_range, names)
    console.say(f"drew {out}")


def rows_to_draw(source: LatentShards | LatentFolder) -> range:
    """All rows; with several buckets the rows of the largest: a picture of them has one shape."""
    if isinstance(source, LatentShards):
        return max(source.buckets, key=lambda bucket: bucket.count).rows
    return range(len(source))


def describe(source: LatentShards | LatentFolder) -> dict[str, object]:
    """Return a dataset's metadata under the manifest's keys."""
    facts, about = source.facts, {}
    if isinstance(source, LatentShards):
        about = {"format": source.manifest["format"], "dtype": source.manifest["dtype"]}
        origin = source.manifest["source"]
        size = sum(entry["bytes"] for entry in source.manifest["shards"])
    else:
        assert isinstance(source, LatentFolder)
        layout = {"classes": "a folder per class", "pair": "features and labels"}
        about = {"format": layout[source.listing.layout], "dtype": str(source.dtype)[6:]}
        origin = source.origin or "unknown"
        size = sum(source.path_of(row).stat().st_size for row in range(len(source)))
    shapes: dict[str, object] = {"shape": list(facts.shape)}
    if isinstance(source, LatentShards) and len(source.buckets) > 1:
        shapes = {
            "buckets": ", ".join(f"{b.count:,} of {list(b.shape)}" for b in source.buckets),
        }
    return {
        **about,
        **shapes,
        "count": f"{facts.count:,}",
        "classes": sizes_of_classes(source),
        "scale": shown(facts.scale),
        "shift": shown(facts.shift),
        "source": origin,
        "bytes": f"{size:,}",
        "digest": facts.digest,
    }


def sizes_of_classes(source: LatentShards | LatentFolder) -> str:
    """Format the number of classes, their first names, and the smallest and the largest class."""
    facts, found = (
        source.facts,
        counted(source.label_parts() if isinstance(source, LatentShards) else source.group_parts()),
    )
    sizes = np.pad(found, (0, facts.num_classes - len(found)))
    names = facts.class_names
    ends = [
        f"{word} {names[at] if at < len(names) else at} with {int(sizes[at]):,}"
        for word, at in (("smallest", int(sizes.argmin())), ("largest", int(sizes.argmax())))
    ]
    named = f" ({few(names)})" if names else ""
    return f"{facts.num_classes:,}{named}, {', '.join(ends)}"


def looks_like_mean_and_std(stored: Shaped[Tensor, "b k *size"], facts: LatentFacts) -> bool:
    """Return True if the second half of the channels may be a std: no value is negative."""
    half = facts.shape[0] // 2
    whole = facts.shape[0] % 2 == 0 and facts.value_range is None
    return whole and bool((stored[:, half:] >= 0).all())
