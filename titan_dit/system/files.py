"""Write files and folders whole or not at all: make them aside, fsync, rename.

A full disk or a killed process leaves the old file. What a killed process left aside is reused or
deleted by the next writer of the same name.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from titan_dit.system.file_lock import open_locked

PARTIAL = ".partial"
"""Suffix of temporary files and folders; they begin with the name of the final one."""


def write_whole(file: Path, content: bytes | str) -> None:
    """Write a file atomically and durably; text as UTF-8. Makes its folder. Raises OSError."""
    with replacing(file) as aside:
        aside.write_bytes(content.encode() if isinstance(content, str) else content)


def write_json(file: Path, values: Any, indent: int = 2) -> None:
    """Write indented JSON atomically and durably. Raises OSError."""
    write_whole(file, json.dumps(values, indent=indent) + "\n")


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Yield an empty temporary file to write; it replaces `file` durably if the block succeeds.

    A link stays a link, and an old file's permissions stay; a new one's follow the umask. A pipe or
    a device is yielded itself. Makes the folder. Raises OSError.
    """
    if file.exists() and not file.is_file() and not file.is_dir():
        yield file
        return
    final = file.resolve()
    final.parent.mkdir(parents=True, exist_ok=True)
    descriptor, aside = open_aside(final)
    try:
        os.ftruncate(descriptor, 0)
        mode = stat.S_IMODE((final if final.is_file() else aside).stat().st_mode)
        yield aside
        # By path, as a library may have replaced the file: safetensors makes one of mode 0600.
        with aside.open("rb") as written:
            os.fsync(written.fileno())
        if stat.S_IMODE(aside.stat().st_mode) != mode:
            aside.chmod(mode)
        aside.replace(final)
    except BaseException:
        with suppress(OSError):  # The file is missing, or the disk fails.
            aside.unlink()
        raise
    finally:
        os.close(descriptor)
    sync_folder(final.parent)


def open_aside(final: Path) -> tuple[int, Path]:
    """The locked descriptor and the path of a temporary file beside `final`.

    The name is always the same, so that a killed process leaves one file at most; while another
    process writes `final`, it has this process's number. Raises OSError.
    """
    aside = final.with_name(f"{final.name}{PARTIAL}")
    try:
        return open_locked(aside), aside
    except BlockingIOError:
        aside = final.with_name(f"{final.name}.{os.getpid()}{PARTIAL}")
        return open_locked(aside), aside


@contextmanager
def new_path(target: Path) -> Iterator[Path]:
    """Yield a path at which to make a file or a folder; renamed to `target` if the block succeeds.

    The path is in a temporary folder beside the target, which may hold other files, too. `target`
    may be an empty folder. Leftovers of killed processes are deleted. Raises OSError.
    """
    final = target.resolve()  # Follows a link.
    aside = final.with_name(f"{final.name}.{os.getpid()}{PARTIAL}")
    lock = -1
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        delete_left(final)
        aside.mkdir()
        with suppress(OSError):  # A file system without locks: then nothing is deleted, either.
            lock = locked(aside)
        yield aside / final.name
        if (aside / final.name).is_dir():
            sync_folder(aside / final.name)
        (aside / final.name).rename(final)
        sync_folder(final.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        if lock >= 0:
            os.close(lock)


def delete_left(final: Path) -> None:
    """Delete the folders of processes that were killed while they wrote `final`."""
    name = re.compile(rf"{re.escape(final.name)}\.\d+{re.escape(PARTIAL)}")
    for folder in final.parent.iterdir():
        if not name.fullmatch(folder.name) or not folder.is_dir():
            continue
        with suppress(OSError):  # Locked by a process that is writing it now.
            lock = locked(folder)
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def locked(folder: Path) -> int:
    """Lock a folder until the descriptor is closed, or the process ends. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


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
