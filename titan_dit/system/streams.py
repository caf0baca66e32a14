"""Standard output and error, whose reader may be gone: `| head`, a terminal that was closed."""

from __future__ import annotations

import errno
import os
import select
import sys
from contextlib import suppress
from typing import TextIO

GONE = (errno.EPIPE, errno.EIO)
"""What writing to a pipe without a reader, and to a closed terminal, ends with."""


def tell(stream: TextIO, text: str) -> None:
    """Write at once. Where nobody can read it, nothing happens, and what follows is not tried.

    On a full disk the text waits in the stream's buffer.
    """
    try:
        stream.write(text)
        stream.flush()
    except OSError as error:
        if error.errno in GONE:
            silence(stream)


def open_missing() -> None:
    """Where a program was started without standard output or error (`>&-`), they lead nowhere."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_WRONLY)  # Takes the number that is free.
            os.set_inheritable(nowhere, True)  # Or a file of the ranks would take it.
            setattr(sys, name, os.fdopen(nowhere, "w"))


def silence(stream: TextIO) -> None:
    """From here on what is written to the stream is lost, whoever writes it: libraries, too."""
    with suppress(OSError, ValueError):  # A stream of a test's has no file.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        stream.flush()


def has_lost_reader(stream: TextIO) -> bool:
    """Whether the stream is a pipe that nobody reads any more."""
    with suppress(OSError, ValueError):
        poll = select.poll()
        poll.register(stream.fileno(), 0)  # Errors are told unasked.
        return any(event & select.POLLERR for _, event in poll.poll(0))
    return False
