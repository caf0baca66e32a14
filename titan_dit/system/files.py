"""Atomic, durable file writes: write a temporary file, fsync, rename."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PARTIAL = ".partial"
"""Suffix of temporary files."""


@contextmanager
def replacing(file: Path, mark: str = "") -> Iterator[Path]:
    """Yield a temporary path (`mark` in its suffix); rename it to `file` if the block succeeds."""
    aside = file.with_name(f"{file.name}{mark}{PARTIAL}")
    try:
        yield aside
        with aside.open("rb") as written:
            os.fsync(written.fileno())
        aside.replace(file)
    except BaseException:
        with suppress(OSError):  # The file is missing, or the disk fails.
            aside.unlink()
        raise
    sync_folder(file.parent)


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder to fill; rename it to `folder` if the block succeeds.

    `folder` may exist if it is empty. Leftovers of a killed process are deleted.
    """
    aside = folder.with_name(f"{folder.name}{PARTIAL}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        if folder.is_dir():
            folder.rmdir()
        aside.rename(folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    sync_folder(folder.resolve().parent)


def write_whole(file: Path, data: bytes) -> None:
    """Write a file atomically and durably."""
    with replacing(file) as aside:
        aside.write_bytes(data)


def reason_of(error: Exception) -> str:
    """The reason of an error as one line, without the path."""
    text = error.strerror if isinstance(error, OSError) else None
    return text or (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def sync_folder(path: Path) -> None:
    """Fsync a folder, so that new names survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
