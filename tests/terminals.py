"""A terminal of a given width in place of stdout and stderr, and what its screen shows."""

import contextlib
import os
import pty
import sys
import termios


@contextlib.contextmanager
def terminal(width, monkeypatch):
    """Yield the stream, and a function that returns what was written since its last call."""
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, width))
    os.set_blocking(master, False)

    def read():
        text = b""
        with contextlib.suppress(BlockingIOError):
            while part := os.read(master, 1 << 16):
                text += part
        return text.decode()

    with os.fdopen(slave, "w") as stream, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", stream)
        patched.setattr(sys, "stderr", stream)
        patched.setenv("TERM", "xterm")
        yield stream, read
    os.close(master)


def screen_of(text, width):
    """The lines that a terminal shows: carriage returns, cleared and wrapped lines."""
    lines, column = [""], 0
    for part in text.replace("\033[K", "\0"):
        if part == "\r":
            column = 0
        elif part == "\0":
            lines[-1] = lines[-1][:column]
        elif part == "\n":
            lines.append("")
        else:
            if column == width:
                lines.append("")
                column = 0
            lines[-1] = lines[-1][:column].ljust(column) + part + lines[-1][column + 1 :]
            column += 1
    return [line for line in lines if line]
