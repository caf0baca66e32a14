"""Identifies a process across pid reuse and machines."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")


def machine() -> str:
    """Identify the pid namespace: host name, boot id, container.

    The host name alone is not unique: hosts or successive containers may share it.
    """
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append((PROC / "sys/kernel/random/boot_id").read_text().strip())
    with suppress(OSError):
        parts.append(str((PROC / "self/ns/pid").readlink()))
    return " ".join(parts)


def start_of(pid: int) -> str:
    """Start time of a process in clock ticks since boot; empty if unknown."""
    return (status(pid) or ("", ""))[1]


def is_alive(pid: int, started: str) -> bool:
    """Return True if the process with this pid and start time is alive on this machine."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # Exists, owned by another user.
    found = status(pid)
    if found is None:
        return True  # Not Linux, or processes are hidden: only the pid is known.
    state, since = found
    return state not in ("Z", "X") and since == started


def status(pid: int) -> tuple[str, str] | None:
    """(state, start time): fields 3 and 22 of /proc/PID/stat; None if unreadable."""
    try:
        # Field 2, the program name in brackets, may contain spaces and brackets.
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], fields[19]
