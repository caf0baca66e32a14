"""Write a .pt file from a .safetensors file, whose mapped pages are released during the write."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titan_dit.interop.tensor_reader import MAPPED


def write(target: Path, source: Path, outline: Mapping[str, Tensor]) -> None:
    """Durably write the tensors of a file of `tensor_writer` as a state dict.

    `outline`: their shapes and dtypes, in the order of the file.
    """
    with source.open("rb") as stream:
        # Private: torch takes writable memory only.
        pages = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
    with target.open("wb") as stream:
        # To a stream: to a path, torch would put the path's name into the file.
        releasing: Any = Releasing(stream, pages)
        torch.save(dict(mapped(pages, outline)), releasing)
        stream.flush()
        os.fsync(stream.fileno())


def mapped(pages: mmap.mmap, outline: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The tensors at the end of mapped pages."""
    place = len(pages) - sum(tensor.nbytes for tensor in outline.values())
    for name, tensor in outline.items():
        flat = torch.frombuffer(pages, dtype=tensor.dtype, count=tensor.numel(), offset=place)
        yield name, flat.view(tensor.shape)
        place += tensor.nbytes


class Releasing:
    """A stream that releases mapped pages whenever it has written more than MAPPED bytes."""

    def __init__(self, stream: Any, pages: mmap.mmap) -> None:
        self.stream, self.pages, self.bytes = stream, pages, 0

    def write(self, data: Any) -> int:
        """Write; the pages are read again from the file if they are needed again."""
        written: int = self.stream.write(data)
        self.bytes += written
        if self.bytes > MAPPED:
            self.pages.madvise(mmap.MADV_DONTNEED)
            self.bytes = 0
        return written

    def flush(self) -> None:
        """Flush the stream."""
        self.stream.flush()
