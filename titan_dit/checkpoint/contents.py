"""The table of a checkpoint's tensors: tensors.json, or `.metadata` in older checkpoints.

Checkpoints are shared between people. torch's `.metadata` is a pickle, which can run code when it
is read: it is written only for torch's own tools. Commands read the same table from tensors.json:

    {"format": "titan_dit.tensors/1", "files": ["__0_0.distcp"], "tensors":
     {"model.w": {"dtype": "float32", "shape": [4, 2], "chunks": [[0, 0, 1234, 0, 0, 4, 2]]}}}

A chunk is [number of its file, first byte, bytes, *offsets in the tensor, *sizes].
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from titan_dit.config import schema, user_text
from titan_dit.config.section import UserError

NAME = "tensors.json"
FORMAT = "titan_dit.tensors/1"
DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
        *(torch.int64, torch.int32, torch.int16, torch.int8),
        *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
        *(torch.bool, torch.complex64, torch.complex128),
    )
}
"""Dtypes of a checkpoint's tensors, by name."""
LARGEST = 2**63 - 1
"""Maximum bytes of a tensor."""
DIMS = 64
"""Maximum dims of a tensor, the limit of torch's kernels."""
AROUND = 1 << 16
"""Maximum bytes that torch.save adds to those of a tensor."""
SCHEMA = {
    "format": str,
    "files": tuple[str, ...],
    "tensors": schema.Each({"dtype": str, "shape": tuple[schema.COUNT, ...], "chunks": schema.ANY}),
}
Row: TypeAlias = list[int]
"""A chunk, as in tensors.json."""


@dataclass(frozen=True)
class Entry:
    """A tensor of a checkpoint."""

    dtype: torch.dtype
    shape: torch.Size
    chunks: Sequence[Row]


@dataclass(frozen=True)
class Contents:
    """All tensors of a checkpoint."""

    files: Sequence[str]
    """Names of the files with tensors."""
    tensors: Mapping[str, Entry]

    def placed(self) -> dict[str, Any]:
        """Name -> (dtype, shape, sorted chunks), equal for equal tables in any order."""
        return {
            name: (
                entry.dtype,
                entry.shape,
                sorted((self.files[file], *rest) for file, *rest in entry.chunks),
            )
            for name, entry in self.tensors.items()
        }


def as_json(metadata: Any, places: Mapping[Any, Any]) -> bytes:
    """The contents of tensors.json, given DCP's metadata and where each chunk was written."""
    files: dict[str, int] = {}
    found: dict[str, dict[str, Any]] = {
        name: {
            "dtype": str(entry.properties.dtype).removeprefix("torch."),
            "shape": list(entry.size),
            "chunks": [],
        }
        for name, entry in metadata.state_dict_metadata.items()
    }
    sizes = {
        (name, tuple(chunk.offsets)): chunk.sizes
        for name, entry in metadata.state_dict_metadata.items()
        for chunk in entry.chunks
    }
    for index, place in places.items():
        number = files.setdefault(place.relative_path, len(files))
        offsets = tuple(index.offset)
        row = [number, place.offset, place.length, *offsets, *sizes[index.fqn, offsets]]
        found[index.fqn]["chunks"].append(row)
    whole = {"format": FORMAT, "files": list(files), "tensors": found}
    return json.dumps(whole, separators=(",", ":")).encode()


def parse(data: bytes, files: Mapping[str, Mapping[str, Any]]) -> Contents:
    """Read tensors.json; `files` are those of the manifest. Raises UserError for a wrong value."""
    try:
        # Not `parse_json`, which walks through all values: 1,024 ranks have a million chunks.
        values = json.loads(data, object_pairs_hook=user_text.once)
    except (ValueError, RecursionError) as error:
        raise UserError(f"it is not valid JSON: {error}") from None
    return checked(values, files)


def checked(values: Any, files: Mapping[str, Mapping[str, Any]]) -> Contents:
    """Build the contents. Raises UserError unless every chunk lies in its tensor and its file."""
    schema.check(values, SCHEMA, "its table")
    if values["format"] != FORMAT:
        raise UserError(f"its format is {schema.brief(values['format'])}, not {FORMAT}")
    names = values["files"]
    if unknown := [name for name in names if name not in files]:
        raise UserError(
            f"it refers to {schema.brief(unknown[0])}, which the manifest does not list"
        )
    if len(set(names)) < len(names):
        raise UserError("it lists a file twice")
    left = [files[name]["bytes"] for name in names]
    ends = list(left)
    found = {}
    for name, table in values["tensors"].items():
        entry = entry_of(name, table)
        check_chunks(name, entry, ends, left)
        found[name] = entry
    if lost := [name for name, size in zip(names, left, strict=True) if size < 0]:
        raise UserError(f"its tensors take more bytes of {lost[0]} than it has")
    return Contents(names, found)


def entry_of(name: str, table: Mapping[str, Any]) -> Entry:
    """A tensor's entry, whose chunks are still to be checked."""
    where = f"its tensor {schema.brief(name)}"
    if table["dtype"] not in DTYPES:
        raise UserError(f"{where} has the dtype {schema.brief(table['dtype'])}")
    dtype, shape = DTYPES[table["dtype"]], table["shape"]
    if len(shape) > DIMS:
        raise UserError(f"{where} has {len(shape):,} dims, more than {DIMS}")
    if math.prod(shape) * dtype.itemsize > LARGEST or math.prod(filter(None, shape)) > LARGEST:
        raise UserError(f"{where} has more than 2^63 bytes")
    if not isinstance(table["chunks"], list):
        raise UserError(f"{where} has no list of chunks")
    return Entry(dtype, torch.Size(shape), table["chunks"])


def check_chunks(name: str, entry: Entry, ends: Sequence[int], left: list[int]) -> None:
    """Raise UserError unless the chunks make up the tensor and lie in their files.

    `ends`: bytes of each file. `left`: bytes of each file not yet taken by a chunk; updated here.
    """
    num_dims, shape, size = len(entry.shape), entry.shape, entry.dtype.itemsize
    elements, starts = 0, set()
    for row in entry.chunks:
        # 1,024 ranks have a million chunks: plain comparisons, not a schema.
        if type(row) is not list or len(row) != 3 + 2 * num_dims or {*map(type, row)} != {int}:
            raise UserError(f"its tensor {schema.brief(name)} has a chunk that is not of numbers")
        file, first, length = row[:3]
        offsets, sizes = row[3 : 3 + num_dims], row[3 + num_dims :]
        held = math.prod(sizes)
        dims = zip(offsets, sizes, shape, strict=True)
        if not all(start >= 0 and part >= 0 and start + part <= dim for start, part, dim in dims):
            raise UserError(f"its tensor {schema.brief(name)} has a chunk outside of its shape")
        if not (0 <= file < len(ends) and first >= 0 and first + length <= ends[file]):
            raise UserError(f"its tensor {schema.brief(name)} has a chunk outside of its file")
        if not held * size <= length <= held * size + AROUND:
            raise UserError(
                f"its tensor {schema.brief(name)} has a chunk of {held * size:,} bytes in "
                f"{length:,} of its file"
            )
        left[file] -= length
        elements += held
        starts.add(tuple(offsets))
    if elements != math.prod(shape) or len(starts) < len(entry.chunks):
        raise UserError(f"the chunks of its tensor {schema.brief(name)} do not make up its shape")
