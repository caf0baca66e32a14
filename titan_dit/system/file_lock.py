"""An exclusive file lock by flock."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path


def open_locked(path: Path) -> int:
    """Open a file, creating it if missing, and lock it until the descriptor is closed.

    A previous holder may have unlinked the file, so the path is checked after locking. On a file
    system without flock the file is only opened. The mode follows the umask, for shared group
    directories. Raises BlockingIOError if another process holds the lock.
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
