"""Which process it is: not a later one of the same number, nor one of another machine."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")


def machine() -> str:
    """Where the number of a process means the same: a kernel since its boot, a container.

    Hosts, and a container and its successor, may share a host name.
    """
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append((PROC / "sys/kernel/random/boot_id").read_text().strip())
    with suppress(OSError):
        parts.append(str((PROC / "self/ns/pid").readlink()))
    return " ".join(parts)


def start_of(pid: int) -> str:
    """When a process was started, in clock ticks since the boot; empty where that is not known."""
    return (status(pid) or ("", ""))[1]


def is_alive(pid: int, started: str) -> bool:
    """Whether the process of this number that was `started` then lives, on this machine."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # Another user's.
    found = status(pid)
    if found is None:
        return True  # Not Linux, or other users' processes are hidden: its number is all there is.
    state, since = found
    return state not in ("Z", "X") and since == started


def status(pid: int) -> tuple[str, str] | None:
    """State and time of start of a process, from the fields 3 and 22 of /proc/PID/stat."""
    try:
        # The second field is the program's name in brackets, which may hold anything.
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], fields[19]
