"""A new file or folder that appears whole or not at all, also if its writer is killed."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from titan_dit.config.section import UserError
from titan_dit.system.files import PARTIAL, reason_of, sync_folder


@contextmanager
def new_output(target: Path) -> Iterator[Path]:
    """Yield a path to write; it is renamed to `target` at the end of the block.

    The path is in a folder beside the target, which may hold other files, too. Leftovers of killed
    processes are deleted. Raises UserError if the target cannot be written. Errors of reading
    within the block need `tensor_reader.reading`.
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
    except (OSError, RuntimeError) as error:  # torch.save raises the latter.
        raise UserError(f"--to {target} cannot be written: {reason_of(error)}.") from None
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
