"""Flags of `data tokenize`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from titan_dit.config.section import (
    FilePath,
    FromHome,
    OutputPath,
    PositiveInt,
    Section,
    Workers,
    Written,
)
from titan_dit.data.tokenizing.chunks import Limits

COMMAND = "data tokenize"
ENGLISH = "en"


@dataclass(frozen=True, kw_only=True)
class Options(Section):
    """Tokenize text files into PREFIX_text_document.bin and .idx, as Megatron reads them."""

    section = COMMAND

    input: tuple[FilePath, ...]
    """Text files: .jsonl (a document a line), .txt (a document a file), also as .gz or .xz, and
    tars of them."""
    output_prefix: OutputPath
    """Path that the names of the output files begin with."""
    tokenizer: FilePath | None = None
    """A tokenizer.json."""
    vocab_file: FilePath | None = None
    """Instead: GPT-2's vocab.json, with --merge-file, or BERT's vocab.txt."""
    merge_file: FilePath | None = None
    """GPT-2's merges.txt."""
    lower: bool = False
    """With BERT's vocab.txt: convert to lower case."""
    json_keys: tuple[str, ...] = ("text",)
    """Keys of a JSON line that hold text; each gets files of its own, PREFIX_KEY_document."""
    append_eod: bool = False
    """Append the token that ends a document."""
    eod_token: str | None = None
    """That token. Default: the first of <|endoftext|>, <|end_of_text|>, </s>, <eos>, [SEP] that the
    tokenizer has."""
    split_sentences: bool = False
    """Make each sentence a sequence, for BERT: PREFIX_KEY_sentence."""
    language: str = ENGLISH
    """Language of the sentences, as in ISO 639; rules for many languages, if it is unknown."""
    workers: Workers = field(default_factory=lambda: min(64, len(os.sched_getaffinity(0))))
    """Worker processes; the result does not depend on them."""
    max_document_bytes: PositiveInt = Limits.max_document_bytes
    """Longer documents are left out and listed."""
    max_ratio: PositiveInt = Limits.max_ratio
    """Refuse .gz and .xz that unpack to more than 64 MiB and more than this many times their
    size."""

    @property
    def prefixes(self) -> list[str]:
        """Paths of the .bin and .idx of each key, without their suffixes."""
        level = "sentence" if self.split_sentences else "document"
        return [f"{self.output_prefix}_{key}_{level}" for key in self.json_keys]

    @property
    def bad_lines(self) -> str:
        """List of the lines that are left out."""
        return f"{self.output_prefix}_bad_lines.txt"

    @property
    def made_tokenizer(self) -> str:
        """The tokenizer.json that is made of --vocab-file."""
        return f"{self.output_prefix}_tokenizer.json"

    def derived(self) -> Iterator[tuple[str, str, FromHome]]:
        """The files that are written."""
        files = [f"{prefix}{suffix}" for prefix in self.prefixes for suffix in (".bin", ".idx")]
        for file in (*files, self.bad_lines, self.made_tokenizer):
            yield "output_prefix", file, Written()
