"""`python -m titan_dit data tokenize`: text files to Megatron's .bin and .idx."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from titan_dit.commands.flags import ENGLISH, TOKENIZE, DataTokenizeFlags
from titan_dit.config.section import UserError, show
from titan_dit.data.indexed_file import IndexedWriter, bin_of, dtype_for, idx_of
from titan_dit.data.tokenizing import tokenizer as tokenizers
from titan_dit.data.tokenizing.chunks import (
    BadLine,
    Limits,
    TextChunk,
    advice_for,
    check_inputs,
    read_chunks,
)
from titan_dit.data.tokenizing.pool import Encoded, Recipe, encode_all
from titan_dit.observe import console
from titan_dit.ranks.disk_errors import writing
from titan_dit.system.files import write_whole
from titan_dit.system.progress import ProgressLine, count

SHOWN = 3
"""Bad lines on the console; a file lists all."""


def main(options: DataTokenizeFlags) -> None:
    """Tokenize, and print a summary."""
    inputs = [Path(name) for name in options.input]
    size = check_inputs(inputs, TOKENIZE)
    made = tokenizer_of(options)
    recipe = recipe_of(options, made)
    prefixes = list(map(Path, options.prefixes))
    for prefix in prefixes:
        if bin_of(prefix).exists() or idx_of(prefix).exists():
            raise UserError(
                f"[{TOKENIZE}] {prefix}.bin or .idx is there already. Delete both, or choose "
                "another --out."
            )
        prefix.parent.mkdir(parents=True, exist_ok=True)
    console.say(
        f"tokenizing {len(inputs):,} files, {count(size)}B, with {options.workers} workers; "
        f"vocabulary {vocabulary_of(made):,}, stored as {np.dtype(recipe.dtype).name}"
    )
    limits = Limits(options.max_document_bytes, options.max_ratio)
    chunks = read_chunks(inputs, TOKENIZE, limits)
    totals = write_all(recipe, prefixes, chunks, size, options.workers)
    report(totals, prefixes, options, made)


def tokenizer_of(options: DataTokenizeFlags) -> Any:
    """Read or make the tokenizer that the flags name.

    Raises UserError for flags that do not fit each other.
    """
    if bool(options.tokenizer) == bool(options.vocab_file):
        raise UserError(
            f"[{TOKENIZE}] give one of --tokenizer (a tokenizer.json) and --vocab-file. `data "
            "train-tokenizer` makes a tokenizer.json."
        )
    if options.tokenizer:
        if options.merge_file or options.lower:
            raise UserError(
                f"[{TOKENIZE}] --merge-file and --lower belong to --vocab-file. Leave them out."
            )
        return tokenizers.read(Path(options.tokenizer), TOKENIZE)
    assert options.vocab_file
    if options.merge_file and options.lower:
        raise UserError(
            f"[{TOKENIZE}] --lower is of BERT's vocab.txt: GPT-2 keeps every letter. Leave it out."
        )
    merges = Path(options.merge_file) if options.merge_file else None
    return tokenizers.from_vocabulary(Path(options.vocab_file), merges, options.lower, TOKENIZE)


def recipe_of(options: DataTokenizeFlags, made: Any) -> Recipe:
    """The settings of the worker processes.

    Raises UserError for flags that do not fit each other.
    """
    if options.split_sentences:
        tokenizers.needed("sentencex", TOKENIZE)
    elif options.language != ENGLISH:
        raise UserError(f"[{TOKENIZE}] --language is of --split-sentences. Add it, or leave both.")
    end = None
    if options.eod_token and not options.append_eod:
        raise UserError(f"[{TOKENIZE}] --eod-token is of --append-eod. Add it, or leave both.")
    if options.append_eod:
        end = tokenizers.end_of_document(made, options.eod_token, TOKENIZE)
    if len(set(options.json_keys)) < len(options.json_keys) or not options.json_keys:
        raise UserError(f"[{TOKENIZE}] json_keys={show(options.json_keys)}: name each key once.")
    return Recipe(
        made.to_str(),
        dtype_for(vocabulary_of(made)).str,
        options.json_keys,
        end,
        options.language if options.split_sentences else None,
    )


def vocabulary_of(made: Any) -> int:
    """The largest id plus 1."""
    found: int = max(made.get_vocab().values()) + 1
    return found


@dataclass
class Totals:
    """Counts of all chunks."""

    documents: int = 0
    sequences: int = 0
    tokens: int = 0
    num_bytes: int = 0
    empty: int = 0
    bad: list[BadLine] = field(default_factory=list)

    def add(self, encoded: Encoded) -> None:
        """Count a chunk's documents."""
        for documents in encoded.by_key.values():
            self.documents += len(documents.sequences)
            self.sequences += len(documents.lengths)
            self.tokens += len(documents.ids)
        self.num_bytes += encoded.num_bytes
        self.empty += encoded.num_empty
        self.bad += encoded.bad


def write_all(
    recipe: Recipe,
    prefixes: list[Path],
    chunks: Iterator[tuple[TextChunk, int]],
    size: int,
    workers: int,
) -> Totals:
    """Encode all chunks and write the result; on an error nothing is written.

    Raises UserError for a disk that is full or cannot be written.
    """
    totals, progress = Totals(), ProgressLine(size, "B", what="tokenized", form=count)
    dtype = np.dtype(recipe.dtype)
    try:
        with writing(f"--out {prefixes[0]}", "Nothing was written."), ExitStack() as stack:
            writers = [stack.enter_context(IndexedWriter(prefix, dtype)) for prefix in prefixes]
            for encoded, done in encode_all(recipe, chunks, workers):
                totals.add(encoded)
                for key, writer in zip(recipe.keys, writers, strict=True):
                    if key in encoded.by_key:
                        part = encoded.by_key[key]
                        writer.add(part.ids, part.lengths, part.sequences)
                progress(done, f"{len(totals.bad):,} bad lines" if totals.bad else "")
            if not totals.documents:
                first = f"; the first is {totals.bad[0]}" if totals.bad else ""
                raise UserError(
                    f"[{TOKENIZE}] no document found: {len(totals.bad):,} bad lines{first}. "
                    f"{advice_for(totals.bad)} Nothing was written."
                )
    finally:
        progress.end()
    return totals


def list_bad(bad: Sequence[BadLine], listed: Path) -> None:
    """Write the list of bad lines, if there are some, and print the first ones."""
    if bad:
        text = "".join(f"{line}\n" for line in bad)
        write_whole(listed, text.encode("utf-8", "backslashreplace"))
        console.say(f"skipped {len(bad):,} bad lines, listed in {listed}:")
        for line in bad[:SHOWN]:
            console.say(f"  {line}")


def report(totals: Totals, prefixes: list[Path], options: DataTokenizeFlags, made: Any) -> None:
    """Print what was written and what was left out; write the list of bad lines."""
    list_bad(totals.bad, Path(options.bad_lines))
    if totals.empty:
        console.say(f"skipped {totals.empty:,} documents without tokens")
    tokenizer = options.tokenizer
    if not tokenizer:
        tokenizer = options.made_tokenizer
        write_whole(Path(tokenizer), tokenizers.text_of(made))
        console.say(f"wrote {tokenizer}")
    console.say(
        f"wrote {totals.documents:,} documents, {totals.sequences:,} sequences, "
        f"{totals.tokens:,} tokens ({totals.num_bytes / max(totals.tokens, 1):.2f} bytes each) to "
        f"{', '.join(map(str, prefixes))}.bin and .idx"
    )
    name = "sentence_pairs" if options.split_sentences else "tokens"
    paths = show([str(prefix) for prefix in prefixes])
    console.say(
        f"to train on them: [data] name = {show(name)}, paths = {paths}, "
        f"tokenizer = {show(tokenizer)}"
    )
