"""The texts of a chunk, and its lines that hold none."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from titan_dit.config.user_text import BadTextError, decode, is_utf8, parse_json
from titan_dit.data.tokenizing.chunks import Chunk


@dataclass(frozen=True)
class BadLine:
    """A line, or a .txt file, that is left out."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        """Format: "corpus.jsonl:12: not JSON"."""
        return f"{self.file}:{self.line}: {self.reason}"


def advice_for(bad: Sequence[BadLine]) -> str:
    """What to do if there are no texts: only JSON lines have keys."""
    of_keys = any("no key" in line.reason or "is no text" in line.reason for line in bad)
    return "--json-keys names the keys of the text." if of_keys else "Correct the files."


def texts_of(chunk: Chunk, keys: Sequence[str]) -> Iterator[tuple[str, ...] | BadLine]:
    """Yield each document's texts, one per key; a .txt file has one text."""
    is_text = chunk.kind == "txt"
    parts = [chunk.data] if is_text else chunk.data.split(b"\n")
    for number, part in enumerate(parts, chunk.first_line):
        if is_text or part.strip():
            try:
                if len(part) > chunk.most:
                    raise BadTextError(f"longer than --max-document-bytes {chunk.most}")
                text = decode(part)
                yield (text,) * len(keys) if is_text else texts_in(text, keys)
            except BadTextError as error:
                yield BadLine(chunk.file, number, str(error).partition(" (")[0])


def texts_in(line: str, keys: Sequence[str]) -> tuple[str, ...]:
    """The texts of a JSON line. Raises BadTextError."""
    entry = parse_json(line)
    if not isinstance(entry, dict):
        raise BadTextError("not an object")
    for key in keys:
        if key not in entry:
            raise BadTextError(f"no key {json.dumps(key)}")
        if type(entry[key]) is not str:
            raise BadTextError(f"{json.dumps(key)} is no text")
        if not is_utf8(entry[key]):
            raise BadTextError(f"{json.dumps(key)} has half a surrogate pair")
    return tuple(entry[key] for key in keys)
