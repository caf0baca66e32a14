"""Writes to stdout and stderr that survive a closed pipe (`| head`) or terminal.

Names of files, classes and tensors are other people's text: control characters in it are printed as
Python's escapes (`printable`).
"""

from __future__ import annotations

import errno
import io
import os
import select
import sys
import unicodedata
from contextlib import suppress
from typing import TextIO

GONE = (errno.EPIPE, errno.EIO)
"""Errors of writing to a closed pipe or terminal."""


CLEARED = "\r\033[K"
"""Clears a terminal's current line, where another process may have left a line of progress."""


OBEYED = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode categories of characters that a terminal acts on or cannot encode: controls, text
direction, surrogates of paths that are not UTF-8, line separators."""
JOINERS = "\u200c\u200d"
"""Zero-width joiners: in these categories, but part of Persian and Indian words and of emoji."""


def printable(text: str, kept: str = "") -> str:
    """Replace characters of `OBEYED`, except `kept`, by Python's escapes, such as that of ESC."""
    if text.isprintable():
        return text
    return "".join(
        repr(c)[1:-1] if c not in kept and unicodedata.category(c) in OBEYED else c for c in text
    )


def write(stream: TextIO, text: str) -> None:
    """Write printable lines and flush; a lost reader silences the stream.

    A full disk keeps the text buffered. On a terminal the text replaces what stands in the current
    line.
    """
    text = printable(text, JOINERS + "\n\t")
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


def prepare() -> None:
    """Open closed streams (`>&-`) on /dev/null; escape what their encoding lacks (LC_ALL=C)."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_WRONLY)  # Gets the free descriptor number.
            os.set_inheritable(nowhere, True)  # Otherwise a file of the ranks gets the number.
            setattr(sys, name, os.fdopen(nowhere, "w"))
        if isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


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
