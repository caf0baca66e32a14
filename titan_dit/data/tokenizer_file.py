"""Read the ids and bytes of a tokenizer.json, without the library that encodes text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titan_dit.config import user_text
from titan_dit.config.section import UserError

ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
"""Tokens that end a document, in order of preference."""
LARGEST_ID = 1 << 24
"""Maximum id: sixteen times a large vocabulary's."""


@dataclass(frozen=True)
class TokenizerFile:
    """The tokens of a tokenizer."""

    path: Path
    ids: Mapping[str, int]
    special: frozenset[str]
    """Special tokens, which have no text."""
    is_byte_level: bool
    """True if every character of a token is one byte of UTF-8, as in GPT-2."""

    @property
    def vocabulary(self) -> int:
        """The largest id plus 1."""
        return max(self.ids.values()) + 1

    @property
    def end_of_document(self) -> int | None:
        """Id of the first token of `ENDS` in the vocabulary; None without one."""
        return next((self.ids[name] for name in ENDS if name in self.ids), None)

    def token_bytes(self) -> NDArray[np.int64] | None:
        """UTF-8 bytes of each id, 0 for special tokens; None unless the tokenizer is byte-level."""
        if not self.is_byte_level:
            return None
        sizes = np.zeros(self.vocabulary, np.int64)
        for token, number in self.ids.items():
            sizes[number] = 0 if token in self.special else len(token)
        return sizes


def read_tokenizer(path: Path) -> TokenizerFile:
    """Read a tokenizer.json. Raises UserError if it is not one."""
    if not path.is_file():
        raise UserError(f"[data] tokenizer={path}: there is no such file. Give its path.")
    text = user_text.read(path, f"[data] tokenizer={path}")
    try:
        whole = user_text.parse_json(text)
        vocabulary = whole["model"]["vocab"]
        # Of a unigram model a list of (token, score).
        ids = (
            dict(vocabulary)
            if isinstance(vocabulary, dict)
            else {token: number for number, (token, _) in enumerate(vocabulary)}
        )
        added = whole.get("added_tokens") or []
        ids |= {entry["content"]: entry["id"] for entry in added}
        special = frozenset(entry["content"] for entry in added if entry.get("special"))
        kinds = set(kinds_of(whole.get("pre_tokenizer")))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        ids = {}
    if not ids or not all(map(is_id, ids.values())) or not all(type(key) is str for key in ids):
        raise UserError(
            f"[data] tokenizer={path}: not a tokenizer.json of the library tokenizers. Give the "
            "one beside the tokens: `data tokenize` writes it, from vocabulary files too."
        )
    return TokenizerFile(path, ids, special, "ByteLevel" in kinds)


def is_id(number: object) -> bool:
    """True for an integer that is valid as an id."""
    return type(number) is int and 0 <= number < LARGEST_ID


def kinds_of(part: Any) -> Iterator[str]:
    """Yield the "type" of a pre-tokenizer and, recursively, of its parts; "" if missing."""
    if isinstance(part, dict):
        yield part.get("type", "")
        for inner in part.get("pretokenizers", ()):
            yield from kinds_of(inner)
