"""What `data show` prints of tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from titan_dit.config.section import UserError
from titan_dit.data.indexed_file import IndexedFile, bin_of, idx_of
from titan_dit.data.token_part import PART, digest_of
from titan_dit.data.tokenizer_file import read_tokenizer
from titan_dit.data.tokenizing import tokenizer as tokenizers
from titan_dit.observe import console
from titan_dit.system.progress import ProgressLine, count

SHOWN_IDS = 64


def prefix_of(path: Path) -> Path | None:
    """The path without .bin or .idx, if it names an indexed dataset."""
    for prefix in (path, path.with_suffix("")):
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
    """What the tokenizer says of the ids."""
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
    """Count every id."""
    counts = np.zeros(0, np.int64)
    progress = ProgressLine(len(file.ids), "tokens", what="counted", form=count)
    for first in range(0, len(file.ids), PART):
        ids = file.ids[first : first + PART]
        if ids.min() < 0:
            raise UserError(f"[data show] {file.bin}: holds the negative id {ids.min()}.")
        more = np.bincount(ids, minlength=len(counts))
        more[: len(counts)] += counts
        counts = more
        progress.add(len(ids))
    progress.end()
    return counts
