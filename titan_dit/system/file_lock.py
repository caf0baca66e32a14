"""A file that one process at a time has locked."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path


def open_locked(path: Path) -> int:
    """Open a file, made where it is missing, and lock it until its descriptor is closed.

    Whoever held it before may have removed it: the one that is locked still has the name. On a file
    system without locks it is opened only. The umask decides who else may write it, as with any
    file of a folder that a group shares. Raises BlockingIOError where another process holds it.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise
        except OSError:
            return descriptor
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        os.close(descriptor)
