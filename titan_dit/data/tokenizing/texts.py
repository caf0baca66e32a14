"""The texts of a chunk, and its lines that hold none."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from titan_dit.data.tokenizing.chunks import Chunk

BOM = b"\xef\xbb\xbf"
"""Some programs begin a file with it."""


@dataclass(frozen=True)
class BadLine:
    """A line, or a .txt file, that is left out."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        """Format: "corpus.jsonl:12: not JSON"."""
        return f"{self.file}:{self.line}: {self.reason}"


def texts_of(chunk: Chunk, keys: Sequence[str]) -> Iterator[tuple[str, ...] | BadLine]:
    """Yield each document's texts, one per key; a .txt file has one text."""
    if chunk.kind == "txt":
        try:
            yield (chunk.data.removeprefix(BOM).decode(),) * len(keys)
        except UnicodeDecodeError:
            yield BadLine(chunk.file, 1, "not UTF-8")
        return
    for number, line in enumerate(chunk.data.split(b"\n"), chunk.first_line):
        if line.strip():
            reason = ""
            try:
                entry = json.loads(line.removeprefix(BOM).decode())
                texts = tuple(entry[key] for key in keys)
                wrong = [
                    key for key, text in zip(keys, texts, strict=True) if type(text) is not str
                ]
                reason = f'"{wrong[0]}" is no text' if wrong else ""
            except UnicodeDecodeError:
                reason = "not UTF-8"
            except (ValueError, RecursionError):
                reason = "not JSON"
            except KeyError as error:
                reason = f"no key {json.dumps(error.args[0])}"
            except TypeError:
                reason = "not an object"
            yield BadLine(chunk.file, number, reason) if reason else texts
