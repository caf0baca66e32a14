"""Exit codes and error messages: one message per failure, and an immediate exit."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from titan_dit.config.section import UserError, not_utf8
from titan_dit.ranks import disk_errors
from titan_dit.system import stdio
from titan_dit.system.files import write_whole
from titan_dit.system.launched_as import LaunchedAs

USER_ERROR, INTERNAL_ERROR, INTERRUPTED, UNREAD = 2, 1, 130, 141
"""UNREAD: 128 + SIGPIPE, as for any command whose reader closed the pipe early."""
HUNG, LEFT = 124, 143
"""HUNG: a rank took no step in time. LEFT: a rank was asked to end before its first step, or left
because another rank died."""
STARTED = "TITAN_DIT_STARTED"
"""Environment variable set by the launcher for restarted ranks, on any node; HERE if this node has
had ranks of the job before."""
HERE = "here"
LEAVING, SAVED = ".leaving", ".saved"
"""Suffixes of files beside torchrun's error file of a rank: it has agreed to end and saves; it has
taken part in a checkpoint that is complete."""
LAUNCH = "TITAN_DIT_LAUNCH"
"""Environment variable set by the launcher: the launch name, equal on all nodes and restarts."""

is_training = False


class Disruption(UserError):
    """A failure of the machine (disk, memory) that a restart may survive."""


class NetworkFailure(Disruption):
    """A process group that could not be opened; a restart may survive it, before training, too."""


def training_started() -> None:
    """Mark the start of training: from here on a file error is not a user error."""
    global is_training
    is_training = True


def run_and_exit(main: Callable[[], int | None]) -> None:
    """Run `main`, report an exception once, and exit with the exit code of either.

    Exits by os._exit: at interpreter shutdown a broken process group can block forever, and a
    thread of an intact process group can abort a finished run.
    """
    stdio.prepare()
    faulthandler.enable(2)  # A crash in native code shows where Python was.
    try:
        code = returned(main)
        atexit._run_exitfuncs()  # Handlers of loggers and worker processes.
    except (Exception, KeyboardInterrupt) as error:
        if is_unread(error):
            code = UNREAD
        else:
            code, message = describe(error)
            report(message, is_user_error=code == USER_ERROR)
    os._exit(flushed(code))


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the block as an exception does, so that it deletes its temporary files.

    Not in a rank: its launcher may have to end it in the middle of a collective.
    """
    if LaunchedAs.here().is_rank or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(LEFT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def returned(main: Callable[[], int | None]) -> int:
    """Run `main`; return its exit code or that of its sys.exit."""
    try:
        return main() or 0
    except SystemExit as error:
        if isinstance(error.code, int | None):
            return error.code or 0
        stdio.write(sys.stderr, f"{error.code}\n")
        return INTERNAL_ERROR


def is_unread(error: BaseException) -> bool:
    """Return True if a command's output pipe was closed; False while training."""
    is_pipe = isinstance(error, BrokenPipeError) and not is_training
    return is_pipe and any(map(stdio.has_lost_reader, (sys.stdout, sys.stderr)))


def flushed(code: int) -> int:
    """Flush stdout and stderr; return the exit code.

    A finished command gets UNREAD if its pipe was closed and INTERNAL_ERROR if its output could
    not be written (full disk). A training run ignores both.
    """
    try:
        sys.stdout.flush()
    except OSError as error:
        stdio.silence(sys.stdout)
        if not is_training and not code:
            if isinstance(error, BrokenPipeError):
                code = UNREAD
            elif error.errno not in stdio.GONE:
                stdio.write(sys.stderr, f"error: standard output: {error}\n")
                code = INTERNAL_ERROR
    stdio.write(sys.stderr, "")
    return code


def describe(error: BaseException) -> tuple[int, str]:
    """Return exit code and message; user errors and file errors have no traceback.

    A file error is a user error before training starts; later a restart may fix it. So may it in
    restarted ranks that load: the disk of their node worked before, and may come back.
    """
    is_file = isinstance(error, OSError) and error.filename is not None  # The message names it.
    is_named = isinstance(error, UnicodeEncodeError) and not_utf8(error.object)
    if is_file or is_named or isinstance(error, UserError):
        has_begun = is_training or os.environ.get(STARTED) == HERE
        is_passing = has_begun and (is_file or isinstance(error, Disruption))
        is_passing |= isinstance(error, NetworkFailure)
        return INTERNAL_ERROR if is_passing else USER_ERROR, f"error: {line_of(error)}"
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, ""
    return INTERNAL_ERROR, "".join(traceback.format_exception(error)).rstrip()


def line_of(error: BaseException) -> str:
    """The message of an error that needs no traceback."""
    if isinstance(error, OSError):
        return disk_errors.line_of(error)
    if isinstance(error, UnicodeEncodeError):
        return not_utf8(error.object)
    # Line breaks of a name are escaped; those of ours are followed by an indented line.
    return re.sub(r"\n(?!  )", r"\\n", str(error).rstrip("\n"))


def is_launched() -> bool:
    """Return True if a launcher started this rank and reads its notes."""
    return bool(os.environ.get("TORCHELASTIC_ERROR_FILE"))


def is_restarted() -> bool:
    """Return True if the launch had ranks before this one (a restart)."""
    return bool(os.environ.get(STARTED))


def report(message: str, is_user_error: bool) -> None:
    """Print the message, or leave it to the launcher, which prints the root cause only."""
    if not is_launched():
        if message:
            stdio.write(sys.stderr, message + "\n")
        return
    details = {
        "timestamp": str(int(time.time())),
        "moment": time.time(),
        "user": is_user_error,
        "trained": is_training,
    }
    leave_note({"message": {"message": message, "extraInfo": details}})


def leave_note(note: dict[str, Any]) -> None:
    """Leave a note for the launcher, if any, in torchrun's error file of this rank."""
    if is_launched():
        # torchrun reads both keys, and ends with a traceback without them, if this rank fails
        # nevertheless: it may be killed after its note about a stop.
        note = {"message": "", "timestamp": str(int(time.time()))} | note
        # Whole or not at all: torchrun's launcher ends at half a file of a rank that is killed.
        write_whole(Path(os.environ["TORCHELASTIC_ERROR_FILE"]), json.dumps(note))


def show(sign: str, text: str = "") -> None:
    """Show the launcher, if any, LEAVING or SAVED of this rank; `text`: the step that is saved."""
    if is_launched():
        with contextlib.suppress(OSError):
            Path(os.environ["TORCHELASTIC_ERROR_FILE"] + sign).write_text(text)
