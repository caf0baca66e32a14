"""Embeddings of captions beside the shards of a dataset: without padding, each caption once.

`text-00000.safetensors` and so on hold captions one after another: `embeddings` [tokens, d], `ends`
[captions] (int64, the tokens before the end of each) and `ids` [tokens] (int32). Captions are
numbered across the files; number 0 is the empty one. `text-index.safetensors` holds the numbers of
each picture's captions, one picture after another (`captions`, int32), and their `ends` [pictures].
A picture has several if its caption is a list, of which a sample number draws one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int64
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from titan_dit.config import user_text
from titan_dit.config.section import UserError
from titan_dit.data.latent_facts import TEXT_DTYPES, TextFacts
from titan_dit.data.manifest import file_digest
from titan_dit.data.shards import RowFile, ShardRows, bytes_of, read_header
from titan_dit.rng import SampleRNG

INDEX = "text-index.safetensors"
CAPTIONS = "captions.jsonl"
"""File of the captions as text, a line of JSON per picture: {"text": one, or a list}."""
NUMPY_DTYPES = {"float16": "<f2", "bfloat16": "<i2", "float32": "<f4"}
"""numpy's dtype for the bytes of each of TEXT_DTYPES; it has no bfloat16."""
REMEDY = "Restore the file, or repeat data encode --text-encoder."


def file_name(number: int) -> str:
    """Name of a file of embeddings."""
    return f"text-{number:05d}.safetensors"


def texts_of(line: bytes, where: str) -> list[str]:
    """The captions in a line of captions.jsonl; `where` begins an error."""
    try:
        text = user_text.parse_json(line)["text"]
    except (ValueError, TypeError, KeyError):
        text = None
    texts = text if isinstance(text, list) else [text]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise UserError(f"{where}: has no text. Restore the file.")
    return texts


class CaptionFile(NamedTuple):
    """A file of embeddings."""

    rows: RowFile
    """Its tokens."""
    ends: NDArray[np.int64]
    """Tokens before the end of each caption; memory-mapped."""


class CaptionEmbeddings:
    """Random access to the embeddings of each picture's caption.

    `entry`: `text` of a checked manifest. Raises UserError for a missing or damaged file.
    """

    def __init__(
        self, path: Path, entry: dict[str, Any], num_pictures: int, verify: bool = False
    ) -> None:
        self.path, self.entry = path, entry
        self.width, self.tokens = entry["width"], entry["tokens"]
        self._torch_dtype = TEXT_DTYPES[entry["dtype"]]
        self._numpy_dtype = np.dtype(NUMPY_DTYPES[entry["dtype"]])
        self.token_bytes = self.width * self._numpy_dtype.itemsize
        self._files = [self._open_file(file, verify) for file in entry["files"]]
        self.file_ends = np.array([len(file.ends) for file in self._files]).cumsum()
        self._rows = ShardRows([file.rows for file in self._files], self.token_bytes)
        index = tensors_of(path, entry["index"], verify)
        self._numbers = array_of(index, "captions", torch.int32, path / INDEX)
        self._ends = array_of(index, "ends", torch.int64, path / INDEX)
        if len(self._ends) != num_pictures or self._ends[-1] != len(self._numbers):
            raise UserError(
                f"[data] {path / entry['index']['file']}: holds captions of {len(self._ends):,} "
                f"pictures, but the shards hold {num_pictures:,}. {REMEDY}"
            )
        null = self.of_captions(np.zeros(1, np.int64))
        self.facts = TextFacts(
            kind=entry["class"],
            digest=entry["digest"],
            tokenizer=entry["tokenizer"],
            layer=entry["layer"],
            template=entry["template"],
            width=self.width,
            tokens=self.tokens,
            dtype=entry["dtype"],
            null=TextFacts.null_text(null["text"][0, : int(null["text_length"][0])]),
        )

    def read(
        self,
        pictures: Int64[np.ndarray, " b"],
        numbers: Sequence[int],
        tokens: int | None = None,
    ) -> dict[str, Tensor]:
        """`text` [b, tokens, d], padded with zeros, and `text_length` [b] of pictures.

        `numbers`: the sample numbers. `tokens`: None is the most. Raises UserError if a caption
        cannot be read, or is longer.
        """
        return self.of_captions(self.chosen(pictures, numbers), tokens)

    def longest(self) -> Int64[np.ndarray, " pictures"]:
        """Tokens of the longest caption of each picture. Raises UserError for a damaged index."""
        lengths = np.concatenate([np.diff(file.ends, prepend=0) for file in self._files])
        begins = np.concatenate([np.zeros(1, np.int64), self._ends[:-1]])
        numbers = self._numbers
        wrong = numbers.min() < 0 or numbers.max() >= len(lengths) or (begins >= self._ends).any()
        if wrong or not 0 <= lengths.min() <= lengths.max() <= self.tokens:
            raise UserError(
                f"[data] {self.path / INDEX}: does not give every picture a caption of at most "
                f"{self.tokens:,} tokens. {REMEDY}"
            )
        found: Int64[np.ndarray, " pictures"] = np.maximum.reduceat(lengths[numbers], begins)
        return found

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
        """Which of each picture's captions `chosen` is, from 0."""
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
        """`text` and `text_length` of captions by number; see `read`."""
        tokens = self.tokens if tokens is None else tokens
        if len(captions) and not 0 <= captions.min() <= captions.max() < self.file_ends[-1]:
            raise UserError(
                f"[data] {self.path / INDEX}: names a caption outside of the "
                f"{self.file_ends[-1]:,}. {REMEDY}"
            )
        found = np.zeros((len(captions), tokens, self.width), self._numpy_dtype)
        lengths = np.zeros(len(captions), np.int64)
        self._rows.read_each(
            sorted(self._reads(captions, lengths, tokens, bytes_of(found)), key=place_of)
        )
        text = torch.from_numpy(found)
        if text.dtype != self._torch_dtype:
            text = text.view(self._torch_dtype)
        return {"text": text, "text_length": torch.from_numpy(lengths)}

    def _reads(
        self,
        captions: Int64[np.ndarray, " b"],
        lengths: NDArray[np.int64],
        tokens: int,
        out: memoryview,
    ) -> Iterator[tuple[int, int, list[memoryview]]]:
        """Yield the reads of captions that have tokens; sets their `lengths`."""
        size = tokens * self.token_bytes
        files = np.searchsorted(self.file_ends, captions, side="right").tolist()
        for i, (number, caption) in enumerate(zip(files, captions.tolist(), strict=True)):
            file = self._files[number]
            within = caption - int(self.file_ends[number]) + len(file.ends)
            first = int(file.ends[within - 1]) if within else 0
            lengths[i] = length = int(file.ends[within]) - first
            if first < 0 or not 0 <= length <= tokens or first + length > file.ends[-1]:
                raise UserError(
                    f"[data] {file.rows.path}: caption {within} is tokens {first:,} to "
                    f"{first + length:,} of {int(file.ends[-1]):,}, but the manifest says at most "
                    f"{tokens:,} each. {REMEDY}"
                )
            if length:
                buffer = out[i * size : i * size + length * self.token_bytes]
                yield number, file.rows.start + first * self.token_bytes, [buffer]

    def _open_file(self, entry: dict[str, Any], verify: bool) -> CaptionFile:
        """Check a file's size, shapes and dtypes, and map its ends."""
        path = self.path / entry["file"]
        tensors = tensors_of(self.path, entry, verify)
        ends = array_of(tensors, "ends", torch.int64, path)
        stored = tensors.get("embeddings")
        shape = (int(ends[-1]) if len(ends) else -1, self.width)
        if len(ends) != entry["count"] or stored is None or tuple(stored.shape) != shape:
            raise UserError(
                f"[data] {path}: its tensors do not hold {entry['count']:,} captions of width "
                f"{self.width}. {REMEDY}"
            )
        if stored.dtype != self._torch_dtype:
            raise UserError(
                f"[data] {path}: holds {stored.dtype}, but the manifest says "
                f"{self.entry['dtype']}. {REMEDY}"
            )
        status = path.stat()
        with path.open("rb") as opened:
            header = read_header(opened.fileno())
        start = next(tensor.start for tensor in header if tensor.name == "embeddings")
        rows = RowFile(path, start, status.st_size, status.st_mtime_ns, header)
        return CaptionFile(rows, ends)


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
