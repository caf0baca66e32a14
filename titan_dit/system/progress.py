"""Progress on a console: on a terminal one line that renews itself, in a log a line per update."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, TextIO

from titan_dit.system import stdio
from titan_dit.system.launched_as import LaunchedAs

LOG_EVERY_S, RENEWED_S = 10.0, 1.0


def width_of(stream: TextIO) -> int | None:
    """Columns of the stream's terminal; None if it has none: a file, a pipe, TERM=dumb."""
    if not stdio.is_terminal(stream):
        return None
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


class Line:
    """A line that renews itself on a terminal. In a log every text is a line of its own.

    `end` leaves the last text on the screen. It is called before other lines: another process may
    have cleared the text in between (`stdio.write`), so it is written again.
    """

    def __init__(self, name: Literal["stdout", "stderr"]) -> None:
        self.name, self.shown = name, ""

    @property
    def stream(self) -> TextIO:
        """The stream, as it is now: tests replace it."""
        stream: TextIO = getattr(sys, self.name)
        return stream

    def show(self, text: str) -> None:
        """Replace the line by `text`, cut to the terminal's width."""
        width, text = width_of(self.stream), stdio.printable(text, stdio.JOINERS)
        if width is None:
            stdio.write(self.stream, text + "\n")
        else:
            # One column is left free: a full row would wrap on some terminals.
            self.shown = text[: width - 1]
            stdio.write(self.stream, self.shown)

    def end(self) -> None:
        """End the open line, if there is one."""
        if self.shown:
            stdio.write(self.stream, self.shown + "\n")
            self.shown = ""


class ProgressLine:
    """Progress of a long command on stderr: how much is done, how fast, and the time left.

    Renewed every second on a terminal. A log gets a line every 10 s, from the first rank.
    """

    def __init__(
        self,
        total: int,
        unit: str,
        *,
        what: str = "",
        form: Callable[[float], str] = "{:,}".format,
        resumes: bool = False,
    ) -> None:
        # If the command resumes, the first count is an earlier run's, and not part of the rate.
        self.first = None if resumes else 0
        self.total, self.unit, self.what, self.form = total, unit, what, form
        self.line = Line("stderr")
        self.on_terminal = width_of(sys.stderr) is not None
        self.every = RENEWED_S if self.on_terminal else LOG_EVERY_S
        self.is_first_rank = LaunchedAs.here().is_first
        self.began = self.written = time.monotonic()
        self.done = 0

    def __call__(self, done: int, note: str = "") -> None:
        """Write the line if it is time; `done` counts all, `note` is appended."""
        self.done, now = done, time.monotonic()
        if self.first is None:
            self.first = done
        is_last = done == self.total and self.on_terminal and bool(self.line.shown)
        if not self.is_first_rank or (now - self.written < self.every and not is_last):
            return
        self.written = now
        rate = max(done - self.first, 1e-9) / max(now - self.began, 1e-9)
        left = duration((self.total - done) / rate) if done > self.first else "?"
        parts = [self.what] if self.what else []
        parts += [f"{self.form(done)}/{self.form(self.total)}", speed(rate, self.unit)]
        parts += [f"ETA {left}", *([note] if note else [])]
        self.line.show("  ".join(parts))

    def add(self, more: int) -> None:
        """Count `more` as done."""
        self.done += more
        self(self.done)

    def end(self) -> None:
        """End the open line."""
        self.line.end()

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


@contextmanager
def following(size: Callable[[], int], progress: ProgressLine) -> Iterator[None]:
    """Renew `progress` from a thread with `size()`, during a call that reports no progress."""
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(RENEWED_S):
            progress(min(size(), progress.total))

    thread = threading.Thread(target=renew, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        progress.end()


def speed(rate: float, unit: str) -> str:
    """Units per second, or seconds for each: 12 -> "12 files/s", 0.4 -> "2.5 s each"."""
    return f"{count(rate)} {unit}/s" if rate >= 1 else f"{1 / rate:.1f} s each"


def count(value: float) -> str:
    """Short form of a count: 1234.5 -> "1.2k", 12 -> "12"."""
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.1f}{letter}"
    return f"{value:.0f}"


def duration(seconds: float) -> str:
    """Clock form of seconds: 3725 -> "1:02:05", 65 -> "1:05"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
