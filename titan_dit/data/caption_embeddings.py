"""Embeddings of captions beside the shards of a dataset, or their token ids alone: each once.

`text-00000.safetensors` and so on hold captions one after another: `embeddings` [tokens, d], `ends`
[captions] (int64, the tokens before the end of each) and `ids` [tokens] (int32). Where padding is
kept, it has embeddings, too, and `id_ends` counts the ids, which are without it. Without embeddings
`ends` counts the ids. Captions are numbered across the files; number 0 is the empty one.
`text-index.safetensors` holds the numbers of each picture's captions, one picture after another
(`captions`, int32), and their `ends` [pictures]; without embeddings also that of the empty caption
(`null` [tokens, d], float32). A picture has several captions if its caption is a list, of which a
sample number draws one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt16
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from titan_dit.config import user_text
from titan_dit.config.section import UserError
from titan_dit.data.latent_facts import ONLINE, TEXT_DTYPES, TextFacts
from titan_dit.data.manifest import file_digest
from titan_dit.data.shards import RowFile, ShardRows, bytes_of, read_header
from titan_dit.rng import SampleRNG

INDEX = "text-index.safetensors"
CAPTIONS = "captions.jsonl"
"""File of the captions as text, a line of JSON per picture: {"text": one, or a list}."""
NUMPY_DTYPES = {"float16": "<f2", "bfloat16": "<i2", "float32": "<f4"}
"""numpy's dtype for the bytes of each of TEXT_DTYPES; it has no bfloat16."""
ID_BYTES = 4
PART = 1 << 16
"""Captions or pictures whose lengths are computed at once."""
REMEDY = "Restore the file, or repeat data encode --text-encoder."


def file_name(number: int) -> str:
    """Name of a file of embeddings."""
    return f"text-{number:05d}.safetensors"


def texts_of(line: bytes, where: str) -> list[str]:
    """The captions in a line of captions.jsonl; `where` begins an error.

    Raises UserError if there are none.
    """
    try:
        text = user_text.parse_json(line)["text"]
    except (ValueError, TypeError, KeyError):
        text = None
    texts = text if isinstance(text, list) else [text]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise UserError(f"{where}: has no text. Restore the file.")
    return texts


class CaptionFile(NamedTuple):
    """A file of captions, one after another; the counts are memory-mapped."""

    embeddings: RowFile | None
    """A row per token; None without embeddings."""
    ends: NDArray[np.int64]
    """Rows before the end of each caption."""
    ids: RowFile
    id_ends: NDArray[np.int64]
    """Ids before the end of each caption."""


class CaptionEmbeddings:
    """Random access to the embeddings of each picture's caption, or to its token ids.

    `entry`: `text` of a checked manifest. Raises UserError for a missing or damaged file.
    """

    def __init__(
        self, path: Path, entry: dict[str, Any], num_pictures: int, verify: bool = False
    ) -> None:
        self.path, self.entry = path, entry
        self.width, self.tokens = entry["width"], entry["tokens"]
        is_online = entry["dtype"] == ONLINE
        self._torch_dtype = None if is_online else TEXT_DTYPES[entry["dtype"]]
        self._numpy_dtype = np.dtype(NUMPY_DTYPES["float32" if is_online else entry["dtype"]])
        self.token_bytes = self.width * self._numpy_dtype.itemsize
        self._files = [self._open_file(file, verify) for file in entry["files"]]
        self.file_ends = np.array([len(file.ends) for file in self._files]).cumsum()
        index = tensors_of(path, entry["index"], verify)
        self._numbers = array_of(index, "captions", torch.int32, path / INDEX)
        self._ends = array_of(index, "ends", torch.int64, path / INDEX)
        if len(self._ends) != num_pictures or self._ends[-1] != len(self._numbers):
            raise UserError(
                f"[data] {path / entry['index']['file']}: holds captions of {len(self._ends):,} "
                f"pictures, but the shards hold {num_pictures:,}. {REMEDY}"
            )
        self._id_rows = ShardRows([file.ids for file in self._files], ID_BYTES)
        stored = [file.embeddings for file in self._files if file.embeddings is not None]
        self._rows = ShardRows(stored, self.token_bytes)
        self.facts = TextFacts(
            kind=entry["class"],
            digest=entry["digest"],
            tokenizer=entry["tokenizer"],
            layer=entry["layer"],
            template=entry["template"],
            padding=entry["padding"],
            width=self.width,
            tokens=self.tokens,
            dtype=entry["dtype"],
        )
        null = null_of(index, self.width, path / INDEX) if is_online else self._stored_null()
        self.facts = replace(self.facts, null=TextFacts.null_text(null))

    def as_ids(self) -> CaptionEmbeddings:
        """The same captions as token ids."""
        found = copy.copy(self)
        found.facts = replace(self.facts, dtype=ONLINE)
        return found

    def read(
        self,
        pictures: Int64[np.ndarray, " b"],
        numbers: Sequence[int],
        tokens: int | None = None,
    ) -> dict[str, Tensor]:
        """`text` [b, tokens, d], padded with zeros, and `text_length` [b] of pictures.

        With token ids `text_ids` [b, tokens] in place of `text`, of the longest caption if `tokens`
        is None. `numbers`: the sample numbers. `tokens`: None is the most. Raises UserError if a
        caption cannot be read, or is longer.
        """
        return self.of_captions(self.chosen(pictures, numbers), tokens)

    def longest(self) -> UInt16[np.ndarray, " pictures"]:
        """Tokens of the longest caption of each picture. Raises UserError for a damaged index.

        Allocates 2 bytes a caption and a picture, beside the mapped counts.
        """
        lengths = np.empty(int(self.file_ends[-1]), np.uint16)  # A manifest allows 10,000 tokens.
        for end, file in zip(self.file_ends.tolist(), self._files, strict=True):
            own = lengths[end - len(file.ends) : end]
            for part, counts in counts_of(file.id_ends if self.facts.is_online else file.ends):
                if not 0 <= counts.min() <= counts.max() <= self.tokens:
                    raise self._damaged()
                own[part] = counts
        found = np.empty(len(self._ends), np.uint16)
        for part, counts in counts_of(self._ends):
            last = int(self._ends[part.stop - 1])
            numbers = self._numbers[max(0, last - int(counts.sum())) : max(0, last)]
            is_whole = 0 < counts.min() <= counts.max() <= len(numbers) == counts.sum()
            if not is_whole or numbers.min() < 0 or numbers.max() >= len(lengths):
                raise self._damaged()
            found[part] = np.maximum.reduceat(lengths[numbers], counts.cumsum() - counts)
        return found

    def _damaged(self) -> UserError:
        return UserError(
            f"[data] {self.path / INDEX}: does not give every picture a caption of at most "
            f"{self.tokens:,} tokens. {REMEDY}"
        )

    def chosen(
        self, pictures: Int64[np.ndarray, " b"], numbers: Sequence[int]
    ) -> Int64[np.ndarray, " b"]:
        """The caption of each picture: its only one, or one drawn by the sample number."""
        begins = np.where(pictures > 0, self._ends[pictures - 1], 0)
        places = begins + self.choices(pictures, numbers)
        chosen: Int64[np.ndarray, " b"] = self._numbers[places].astype(np.int64)
        return chosen

    def choices(
        self, pictures: Int64[np.ndarray, " b"], numbers: Sequence[int]
    ) -> Int64[np.ndarray, " b"]:
        """Which of each picture's captions `chosen` is, from 0.

        Raises UserError for a damaged index.
        """
        ends = self._ends[pictures]
        begins = np.where(pictures > 0, self._ends[pictures - 1], 0)
        counts = ends - begins
        if ((begins < 0) | (counts < 1) | (ends > len(self._numbers))).any():
            raise UserError(
                f"[data] {self.path / INDEX}: its ends do not give every picture a caption. "
                f"{REMEDY}"
            )
        choices = np.zeros_like(counts)
        if (counts > 1).any():
            rng = SampleRNG(0, torch.tensor(list(numbers)))
            drawn = (rng.uniform("caption").double().numpy() * counts).astype(np.int64)
            choices = np.minimum(drawn, counts - 1)
        found: Int64[np.ndarray, " b"] = choices
        return found

    def of_captions(
        self, captions: Int64[np.ndarray, " b"], tokens: int | None = None
    ) -> dict[str, Tensor]:
        """`text` or `text_ids`, and `text_length`, of captions by number; see `read`.

        Raises UserError for a damaged index.
        """
        if len(captions) and not 0 <= captions.min() <= captions.max() < self.file_ends[-1]:
            raise UserError(
                f"[data] {self.path / INDEX}: names a caption outside of the "
                f"{self.file_ends[-1]:,}. {REMEDY}"
            )
        if self.facts.is_online:
            return self._ids_of(captions, tokens)
        tokens = self.tokens if tokens is None else tokens
        found = np.zeros((len(captions), tokens, self.width), self._numpy_dtype)
        spans = [
            (number, place, file.embeddings.start, file.ends)
            for number, place, file in self._places(captions)
            if file.embeddings is not None
        ]
        lengths = self._read_into(found, self._rows, spans, self.token_bytes)
        text = torch.from_numpy(found)
        if self._torch_dtype not in (None, text.dtype):
            text = text.view(self._torch_dtype)
        return {"text": text, "text_length": torch.from_numpy(lengths)}

    def _ids_of(self, captions: Int64[np.ndarray, " b"], tokens: int | None) -> dict[str, Tensor]:
        found = np.zeros((len(captions), self.tokens if tokens is None else tokens), "<i4")
        spans = [
            (number, place, file.ids.start, file.id_ends)
            for number, place, file in self._places(captions)
        ]
        lengths = self._read_into(found, self._id_rows, spans, ID_BYTES)
        if tokens is None:
            found = np.ascontiguousarray(found[:, : int(lengths.max(initial=1))])
        return {"text_ids": torch.from_numpy(found), "text_length": torch.from_numpy(lengths)}

    def _stored_null(self) -> Float[Tensor, "n d"]:
        null = self.of_captions(np.zeros(1, np.int64))
        found: Tensor = null["text"][0, : int(null["text_length"][0])]
        return found

    def _places(self, captions: Int64[np.ndarray, " b"]) -> Iterator[tuple[int, int, CaptionFile]]:
        """Yield (number of the file, caption within it, the file) of captions."""
        files = np.searchsorted(self.file_ends, captions, side="right").tolist()
        for number, caption in zip(files, captions.tolist(), strict=True):
            file = self._files[number]
            yield number, caption - int(self.file_ends[number]) + len(file.ends), file

    def _read_into(
        self,
        found: NDArray[Any],
        rows: ShardRows,
        spans: Sequence[tuple[int, int, int, NDArray[np.int64]]],
        token_bytes: int,
    ) -> NDArray[np.int64]:
        """Fill `found` [b, tokens, ...] with captions; return the tokens of each.

        `spans`: for each the number of its file, its place there, the offset of the file's tokens,
        their ends.
        """
        lengths = np.zeros(len(spans), np.int64)
        tokens = found.shape[1]
        reads, out, size = [], bytes_of(found), tokens * token_bytes
        for i, (number, place, start, ends) in enumerate(spans):
            first = int(ends[place - 1]) if place else 0
            lengths[i] = length = int(ends[place]) - first
            if first < 0 or not 0 <= length <= tokens or first + length > ends[-1]:
                raise UserError(
                    f"[data] {self._files[number].ids.path}: caption {place} is tokens {first:,} "
                    f"to {first + length:,} of {int(ends[-1]):,}, but the manifest says at most "
                    f"{tokens:,} each. {REMEDY}"
                )
            if length:
                buffer = out[i * size : i * size + length * token_bytes]
                reads.append((number, start + first * token_bytes, [buffer]))
        rows.read_each(sorted(reads, key=place_of))
        return lengths

    def _open_file(self, entry: dict[str, Any], verify: bool) -> CaptionFile:
        """Check a file's size, shapes and dtypes, and map its ends."""
        path = self.path / entry["file"]
        tensors = tensors_of(self.path, entry, verify)
        ends = array_of(tensors, "ends", torch.int64, path)
        id_ends = array_of(tensors, "id_ends", torch.int64, path) if "id_ends" in tensors else ends
        wanted: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "ids": (torch.int32, (int(id_ends[-1]),))
        }
        if self._torch_dtype is not None:
            wanted["embeddings"] = self._torch_dtype, (int(ends[-1]), self.width)
        if not len(ends) == len(id_ends) == entry["count"]:
            raise UserError(
                f"[data] {path}: its tensors do not hold {entry['count']:,} captions. {REMEDY}"
            )
        for name, (dtype, shape) in wanted.items():
            stored = tensors.get(name)
            if stored is None or tuple(stored.shape) != shape:
                raise UserError(
                    f"[data] {path}: its tensors do not hold {entry['count']:,} captions of width "
                    f"{self.width}: {name} must be {list(shape)}. {REMEDY}"
                )
            if stored.dtype != dtype:
                raise UserError(
                    f"[data] {path}: holds {name} of {stored.dtype}, but the manifest says "
                    f"{str(dtype).removeprefix('torch.')}. {REMEDY}"
                )
        status = path.stat()
        with path.open("rb") as opened:
            header = read_header(opened.fileno())
        starts = {tensor.name: tensor.start for tensor in header}
        found = {
            name: RowFile(path, starts[name], status.st_size, status.st_mtime_ns, header)
            for name in wanted
        }
        return CaptionFile(found.get("embeddings"), ends, found["ids"], id_ends)


def counts_of(ends: NDArray[np.int64]) -> Iterator[tuple[slice, NDArray[np.int64]]]:
    """Yield (part, its counts) for the running totals `ends`, in parts that need little memory."""
    for first in range(0, len(ends), PART):
        part = slice(first, min(first + PART, len(ends)))
        yield part, np.diff(ends[part], prepend=ends[first - 1] if first else 0)


def null_of(index: dict[str, Tensor], width: int, file: Path) -> Float[Tensor, "n d"]:
    """The embedding of the empty caption in an index. Raises UserError if it is not there."""
    null = index.get("null")
    if null is None or null.dtype != torch.float32 or null.dim() != 2 or null.shape[1] != width:
        raise UserError(
            f"[data] {file}: has no null, the empty caption's float32 [tokens, {width}]. {REMEDY}"
        )
    return null


def place_of(read: tuple[int, int, list[memoryview]]) -> tuple[int, int]:
    """File and offset of a read: files are read in their order."""
    return read[0], read[1]


def tensors_of(path: Path, entry: dict[str, Any], verify: bool) -> dict[str, Tensor]:
    """Views of a file's mapped tensors. Raises UserError for another size or SHA-256."""
    file = path / entry["file"]
    if not file.is_file():
        raise UserError(f"[data] {file}: the embeddings of captions are missing. {REMEDY}")
    if (size := file.stat().st_size) != entry["bytes"]:
        raise UserError(
            f"[data] {file}: {size:,} bytes, but the manifest says {entry['bytes']:,}. {REMEDY}"
        )
    if verify and file_digest(file) != entry["sha256"]:
        raise UserError(f"[data] {file}: its SHA-256 differs from the manifest's. {REMEDY}")
    try:
        with safe_open(file, framework="pt") as opened:
            names = list(opened.keys())
            return {name: opened.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise UserError(f"[data] {file}: not readable ({error}). {REMEDY}") from None


def array_of(tensors: dict[str, Tensor], name: str, dtype: torch.dtype, file: Path) -> NDArray[Any]:
    """One of a file's tensors as a view. Raises UserError unless it is a row of `dtype`."""
    tensor = tensors.get(name)
    if tensor is None or tensor.dtype != dtype or tensor.dim() != 1 or not len(tensor):
        raise UserError(f"[data] {file}: has no {name}, a row of {dtype}. {REMEDY}")
    found: NDArray[Any] = tensor.numpy()
    return found
