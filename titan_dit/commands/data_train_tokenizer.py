"""`python -m titan_dit data train-tokenizer`: a tokenizer.json from text files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from titan_dit.commands.data_tokenize import list_bad
from titan_dit.commands.flags.data_train_tokenizer import COMMAND, Options
from titan_dit.config.section import UserError
from titan_dit.data.tokenizing import tokenizer as tokenizers
from titan_dit.data.tokenizing.chunks import Chunk, Limits, check_inputs, read_chunks
from titan_dit.data.tokenizing.texts import BadLine, advice_for, texts_of
from titan_dit.observe import console
from titan_dit.system.files import write_whole
from titan_dit.system.progress import ProgressLine, count

BYTES = 256 + len(tokenizers.GPT_SPECIAL)
"""Tokens of every byte-level BPE."""


def main(options: Options) -> None:
    """Train, and write the file."""
    inputs = [Path(name) for name in options.input]
    size = check_inputs(inputs, COMMAND)
    if Path(options.output).exists():
        raise UserError(f"[{COMMAND}] output={options.output} is there already. Delete it.")
    if options.lower and options.kind == "bpe":
        raise UserError(f"[{COMMAND}] --lower is of --kind wordpiece: bpe keeps every byte.")
    if options.kind == "bpe":
        check_size(options.vocabulary, BYTES)
    tokenizers.needed("tokenizers", COMMAND)
    Path(options.output).parent.mkdir(parents=True, exist_ok=True)
    chunks = read_chunks(inputs, COMMAND, Limits(options.max_document_bytes, options.max_ratio))
    bad: list[BadLine] = []
    texts = read_texts(chunks, size, options.json_keys, bad)
    made = tokenizers.train(texts, options.kind, options.vocabulary, options.lower, COMMAND)
    check_size(options.vocabulary, made.get_vocab_size())
    write_whole(Path(options.output), tokenizers.text_of(made).encode())
    console.say(f"wrote {options.output}: {made.get_vocab_size():,} tokens")
    list_bad(bad, Path(options.output).with_suffix(".bad_lines.txt"))
    if made.get_vocab_size() < options.vocabulary:
        console.say(f"the text has no more; vocabulary={options.vocabulary:,} was wanted")


def check_size(vocabulary: int, least: int) -> None:
    """Refuse a vocabulary without room for single characters and special tokens."""
    if vocabulary < least:
        raise UserError(
            f"[{COMMAND}] vocabulary={vocabulary} is fewer than the {least} single characters and "
            f"special tokens. Set vocabulary = {least} or more."
        )


def read_texts(
    chunks: Iterator[tuple[Chunk, int]], size: int, keys: tuple[str, ...], bad: list[BadLine]
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
            f"[{COMMAND}] no text found: {len(bad):,} bad lines{first}. {advice_for(bad)}"
        )
