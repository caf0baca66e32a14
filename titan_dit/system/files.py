"""Files that are whole or not there: written aside, synced to the disk, then renamed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PARTIAL = ".partial"
"""The end of the name of what is being written."""


@contextmanager
def replacing(file: Path, mark: str = "") -> Iterator[Path]:
    """The path to write to within the block; at its end it takes the place of `file`.

    If the block raises, `file` stays as it was. `mark` keeps writers of one file apart.
    """
    aside = file.with_name(f"{file.name}{mark}{PARTIAL}")
    try:
        yield aside
        with aside.open("rb") as written:
            os.fsync(written.fileno())
        aside.replace(file)
    finally:
        aside.unlink(missing_ok=True)
    sync_folder(file.parent)


def write_whole(file: Path, data: bytes) -> None:
    """Write a file; it survives a power cut once this returns."""
    with replacing(file) as aside:
        aside.write_bytes(data)


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
