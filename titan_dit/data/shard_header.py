"""The header of a safetensors file: its tensors and their offsets.

A file is the length of the header (8 bytes), the header as JSON, and the tensors' bytes.
"""

from __future__ import annotations

import json
import os
from typing import NamedTuple

LENGTH = 8
MAX_BYTES = 1 << 20
"""Maximum bytes of a header: a shard has two tensors."""


class StoredTensor(NamedTuple):
    """A tensor of a file."""

    name: str
    dtype: str
    """Dtype in the format's words: F16."""
    shape: tuple[int, ...]
    start: int
    """Offset of the first byte in the file."""

    def __str__(self) -> str:
        """Format for error messages."""
        return f"{self.name} {self.dtype} {list(self.shape)} from byte {self.start:,}"


def read_header(descriptor: int) -> tuple[StoredTensor, ...]:
    """The tensors of an open file, by name. Raises ValueError if it has no valid header."""
    size = int.from_bytes(os.pread(descriptor, LENGTH, 0), "little")
    end = LENGTH + size
    if size > MAX_BYTES or end > os.fstat(descriptor).st_size:
        raise ValueError("no safetensors header")
    try:
        header = json.loads(os.pread(descriptor, size, LENGTH))
        return tuple(
            StoredTensor(
                name, entry["dtype"], tuple(entry["shape"]), end + entry["data_offsets"][0]
            )
            for name, entry in sorted(header.items())
            if name != "__metadata__"
        )
    except (AttributeError, LookupError, RecursionError, TypeError):
        raise ValueError("no safetensors header") from None
