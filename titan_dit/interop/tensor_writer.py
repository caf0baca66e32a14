"""Write .safetensors files one tensor at a time, in shards with an index if they are large.

A file is the length of its header (8 bytes), the header (JSON: names, dtypes, shapes, offsets) and
the tensors' bytes in the header's order.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

INDEX = ".index.json"
"""Suffix of the index of a file in shards."""
NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}


def write(
    folder: Path,
    whole: str,
    outline: Mapping[str, Tensor],
    tensors: Iterable[tuple[str, Tensor]],
    largest_shard: int | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a file `whole`, or shards of at most `largest_shard` bytes and their index.

    `outline`: shapes and dtypes, in the order in which `tensors` yields.
    """
    shards = list(sharded(outline, largest_shard))
    stem, count = whole.removesuffix(".safetensors"), len(shards)
    names = [f"{stem}-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    names = [whole] if len(shards) == 1 else names
    source = iter(tensors)
    for name, shard in zip(names, shards, strict=True):
        write_file(folder / name, shard, source, metadata or {"format": "pt"})
    if len(shards) > 1:
        table = {k: name for name, shard in zip(names, shards, strict=True) for k in shard}
        size = sum(tensor.nbytes for tensor in outline.values())
        index = {"metadata": {"total_size": size}, "weight_map": table}
        (folder / (whole + INDEX)).write_text(json.dumps(index, indent=2) + "\n")


def write_file(
    file: Path,
    outline: Mapping[str, Tensor],
    source: Iterator[tuple[str, Tensor]],
    metadata: Mapping[str, str],
) -> None:
    """Write the next tensors of `source`, those of `outline`, durably."""
    with file.open("wb") as stream:
        stream.write(header(outline, metadata))
        for name, expected in outline.items():
            found, tensor = next(source)
            given = (found, tensor.shape, tensor.dtype)
            assert given == (name, expected.shape, expected.dtype), given
            flat = tensor.detach().cpu().contiguous().flatten()
            stream.write(flat.view(torch.uint8).numpy().data)
            del found, tensor, flat  # Before the next one is made.
        stream.flush()
        os.fsync(stream.fileno())


def header(outline: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """The length of the header and the header, padded so that the tensors are aligned."""
    table: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in outline.items():
        begin, end = end, end + tensor.nbytes
        shape = list(tensor.shape)
        table[name] = {"dtype": NAMES[tensor.dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def sharded(
    tensors: Mapping[str, Tensor], largest: int | None = None
) -> Iterator[dict[str, Tensor]]:
    """Cut tensors, in their order, into shards of at most `largest` bytes, or one tensor."""
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if shard and largest is not None and size + tensor.nbytes > largest:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    yield shard
