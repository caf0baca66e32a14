"""`python -m titan_dit data train-tokenizer`: a tokenizer.json from text files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from titan_dit.commands.data_tokenize import list_bad
from titan_dit.commands.flags import TRAIN_TOKENIZER, DataTrainTokenizerFlags
from titan_dit.config.section import UserError
from titan_dit.data.tokenizing import tokenizer as tokenizers
from titan_dit.data.tokenizing.chunks import (
    BadLine,
    Limits,
    TextChunk,
    advice_for,
    check_inputs,
    read_chunks,
    texts_of,
)
from titan_dit.observe import console
from titan_dit.ranks import disk_errors
from titan_dit.system.files import try_to_replace, write_whole
from titan_dit.system.progress import ProgressLine, count

BYTES = 256 + len(tokenizers.GPT_SPECIAL)
"""Tokens of every byte-level BPE."""


def main(options: DataTrainTokenizerFlags) -> None:
    """Train, and write the file."""
    inputs = [Path(name) for name in options.input]
    size = check_inputs(inputs, TRAIN_TOKENIZER)
    if Path(options.out).exists():
        raise UserError(f"[{TRAIN_TOKENIZER}] out={options.out} is there already. Delete it.")
    with disk_errors.writing(f"--out {options.out}"):
        try_to_replace(Path(options.out))
    if options.lower and options.kind == "bpe":
        raise UserError(
            f"[{TRAIN_TOKENIZER}] --lower is of --kind wordpiece: bpe keeps every byte. Leave "
            "it out."
        )
    if options.kind == "bpe":
        check_size(options.vocabulary, BYTES)
    tokenizers.needed("tokenizers", TRAIN_TOKENIZER)
    chunks = read_chunks(
        inputs, TRAIN_TOKENIZER, Limits(options.max_document_bytes, options.max_ratio)
    )
    bad: list[BadLine] = []
    texts = read_texts(chunks, size, options.json_keys, bad)
    made = tokenizers.train(texts, options.kind, options.vocabulary, options.lower, TRAIN_TOKENIZER)
    check_size(options.vocabulary, made.get_vocab_size())
    write_whole(Path(options.out), tokenizers.text_of(made))
    console.say(f"wrote {options.out}: {made.get_vocab_size():,} tokens")
    list_bad(bad, Path(options.out).with_suffix(".bad_lines.txt"))
    if made.get_vocab_size() < options.vocabulary:
        console.say(f"the text has no more; vocabulary={options.vocabulary:,} was wanted")


def check_size(vocabulary: int, least: int) -> None:
    """Raise UserError for a vocabulary without room for single characters and special tokens."""
    if vocabulary < least:
        raise UserError(
            f"[{TRAIN_TOKENIZER}] vocabulary={vocabulary} is fewer than the {least} single "
            f"characters and special tokens. Set vocabulary = {least} or more."
        )


def read_texts(
    chunks: Iterator[tuple[TextChunk, int]], size: int, keys: tuple[str, ...], bad: list[BadLine]
) -> Iterator[str]:
    """Yield all texts, and add the bad lines to `bad`; refuses inputs without any text."""
    progress, found = ProgressLine(size, "B", what="read", form=count), 0
    for chunk, done in chunks:
        for texts in texts_of(chunk, keys):
            if isinstance(texts, BadLine):
                bad.append(texts)
            else:
                found += 1
                yield from texts[:1] if chunk.kind == "txt" else texts
        progress(done)
    progress.end()
    if not found:
        first = f"; the first is {bad[0]}" if bad else ""
        raise UserError(
            f"[{TRAIN_TOKENIZER}] no text found: {len(bad):,} bad lines{first}. {advice_for(bad)}"
        )
