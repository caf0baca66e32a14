"""Write files and folders whole or not at all: make them aside, fsync, rename.

A full disk or a killed process leaves the old file. What a killed process left aside is deleted by
the next process of its host that writes into the folder.
"""

from __future__ import annotations

import errno
import functools
import itertools
import json
import os
import re
import shutil
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

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
    delete_left_once(final.parent)
    if final.is_file() and not os.access(final, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))
    aside = new_aside(final, lambda path: path.touch(exist_ok=False))
    try:
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
    sync_folder(final.parent)


def try_to_replace(file: Path) -> None:
    """Raise OSError unless `file` could be replaced now; makes its folder."""

    class Unwritten(Exception): ...

    with suppress(Unwritten), replacing(file):
        raise Unwritten


@contextmanager
def new_path(target: Path) -> Iterator[Path]:
    """Yield a path at which to make a file or a folder; renamed to `target` if the block succeeds.

    The path is in a temporary folder beside the target, which may hold other files, too. `target`
    may be an empty folder. Leftovers of killed processes are deleted. Raises OSError.
    """
    final = target.resolve()  # Follows a link.
    final.parent.mkdir(parents=True, exist_ok=True)
    delete_left(final.parent)
    aside = new_aside(final, Path.mkdir)
    try:
        yield aside / final.name
        if (aside / final.name).is_dir():
            sync_folder(aside / final.name)
        (aside / final.name).rename(final)
        sync_folder(final.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def new_aside(final: Path, make: Callable[[Path], object]) -> Path:
    """Make a temporary file or folder beside `final`; its name has this host and process.

    Not one name for all: on a shared disk another host may write `final` now, and locks are not
    shared everywhere.
    """
    name = final.name.encode()[:120].decode(errors="ignore")  # A name has up to 255 bytes.
    for number in itertools.count():
        aside = final.with_name(f"{name}.{this_host()}-{os.getpid()}.{number}{PARTIAL}")
        # FileExistsError: by another thread, or a process with this number in another container.
        with suppress(FileExistsError):
            make(aside)
            return aside
    raise AssertionError


def this_host() -> str:
    """The host and its pid namespace, as part of a file name: containers may share a name."""
    host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname()[:60])
    with suppress(OSError):  # Not Linux.
        host += f"-{Path('/proc/self/ns/pid').stat().st_ino}"
    return host


def delete_left(folder: Path) -> None:
    """Delete the temporary files and folders of processes of this host that were killed."""
    ours = re.compile(rf".*\.{this_host()}-(\d+)\.\d+{re.escape(PARTIAL)}", re.DOTALL)
    for aside in folder.iterdir():
        if (match := ours.fullmatch(aside.name)) and not is_process(int(match[1])):
            with suppress(OSError):
                shutil.rmtree(aside) if aside.is_dir() else aside.unlink()


@functools.lru_cache(64)
def delete_left_once(folder: Path) -> None:
    """`delete_left`, at the first file of a folder: it may hold many, written one by one."""
    delete_left(folder)


def is_process(pid: int) -> bool:
    """True if a process of this host has this number."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # It exists, and is another user's.
    return True


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
