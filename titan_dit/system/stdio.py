"""Writes to stdout and stderr that survive a closed pipe (`| head`) or terminal."""

from __future__ import annotations

import errno
import os
import select
import sys
from contextlib import suppress
from typing import TextIO

GONE = (errno.EPIPE, errno.EIO)
"""Errors of writing to a closed pipe or terminal."""


CLEARED = "\r\033[K"
"""Clears a terminal's current line, where another process may have left a line of progress."""


def write(stream: TextIO, text: str) -> None:
    """Write and flush. A full disk keeps the text buffered; a lost reader silences the stream.

    On a terminal the text replaces what stands in the current line.
    """
    try:
        stream.write(CLEARED + text if text and is_terminal(stream) else text)
        stream.flush()
    except OSError as error:
        if error.errno in GONE:
            silence(stream)


def is_terminal(stream: TextIO) -> bool:
    """Return True if the stream is a terminal that can clear a line."""
    try:
        return stream.isatty() and os.environ.get("TERM") != "dumb"
    except (OSError, ValueError):  # Closed.
        return False


def open_missing() -> None:
    """Redirect stdout and stderr to /dev/null if they were closed at start (`>&-`)."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_WRONLY)  # Gets the free descriptor number.
            os.set_inheritable(nowhere, True)  # Or a file of the ranks gets the number.
            setattr(sys, name, os.fdopen(nowhere, "w"))


def silence(stream: TextIO) -> None:
    """Redirect the stream's file descriptor to /dev/null, for libraries, too."""
    with suppress(OSError, ValueError):  # Streams of tests may have no file.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        stream.flush()


def has_lost_reader(stream: TextIO) -> bool:
    """Return True if the stream is a pipe without a reader."""
    with suppress(OSError, ValueError):
        poll = select.poll()
        poll.register(stream.fileno(), 0)  # POLLERR is always reported.
        return any(event & select.POLLERR for _, event in poll.poll(0))
    return False
