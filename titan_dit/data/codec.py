"""Codecs between text and token ids: a tokenizer.json, or numbers without one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from titan_dit.config.section import UserError
from titan_dit.data.tokenizing import tokenizer


@runtime_checkable
class Codec(Protocol):
    """A codec between text and token ids."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without special tokens around them."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""


class NumberCodec:
    """A codec of ids written as numbers, such as "17 4 4", for data without a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Read the ids; UserError for other words."""
        words = text.split()
        if wrong := [word for word in words if not word.isdecimal()]:
            raise UserError(
                f"the prompt holds {wrong[0]!r}, but the data names no tokenizer: write token ids, "
                'such as "17 4 4", or name the tokenizer.json.'
            )
        return [int(word) for word in words]

    def decode(self, ids: Sequence[int]) -> str:
        """Write the ids."""
        return " ".join(map(str, ids))


class TokenizerCodec:
    """A tokenizer of the library tokenizers."""

    def __init__(self, path: Path) -> None:
        self.tokenizer = tokenizer.read(path, "data")

    def encode(self, text: str) -> list[int]:
        """See `Codec.encode`."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """See `Codec.decode`. Bytes that are not a whole UTF-8 character become U+FFFD."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=False)
        return text


def codec_of(path: str) -> Codec:
    """The codec of a tokenizer.json, or of numbers if `path` is ""."""
    return TokenizerCodec(Path(path)) if path else NumberCodec()
