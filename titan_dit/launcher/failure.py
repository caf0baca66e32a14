"""How a process ends when something goes wrong: one message, an exit code, no waiting."""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from titan_dit.config.section import UserError
from titan_dit.system import streams

USER_ERROR, INTERNAL_ERROR, INTERRUPTED, UNREAD = 2, 1, 130, 141
"""UNREAD, 128 + SIGPIPE, is what a shell reports of any command whose reader left before its end:
what it had to say, or to write, is not all there."""
HUNG, LEFT = 124, 143
"""A rank that took no step in time; one that was told to leave before it had done anything, or
because another had died."""
STARTED = "TITAN_DIT_STARTED"
"""Set by the launcher for ranks of a job that had ranks before, on this node or on others."""
LAUNCH = "TITAN_DIT_LAUNCH"
"""Set by the launcher: one name for all ranks of a job, on all nodes and after every restart."""

is_training = False


class Disruption(UserError):
    """What the machine did to a run, and may not do again: a disk, the memory."""


def begun() -> None:
    """Training begins: what a disk does from here on is no mistake of the user's."""
    global is_training
    is_training = True


def guarded(main: Callable[[], int | None]) -> None:
    """Run `main` and end the process with the code it returns; what it raises is reported once.

    The end is os._exit, not the end of Python: there a broken process group can wait for ever, and
    a thread of a whole one has been seen to abort a run that was done.
    """
    streams.open_missing()
    try:
        code = returned(main)
        atexit._run_exitfuncs()  # What loggers and worker processes have asked for.
    except (Exception, KeyboardInterrupt) as error:
        if is_unread(error):
            code = UNREAD
        else:
            code, message = describe(error)
            report(message, is_user_error=code == USER_ERROR)
    os._exit(flushed(code))


def returned(main: Callable[[], int | None]) -> int:
    """The exit code that `main` returns, or gives to sys.exit."""
    try:
        return main() or 0
    except SystemExit as error:
        if isinstance(error.code, int | None):
            return error.code or 0
        streams.tell(sys.stderr, f"{error.code}\n")
        return INTERNAL_ERROR


def is_unread(error: BaseException) -> bool:
    """Whether a command, not a training run, has nobody left to read what it says."""
    is_pipe = isinstance(error, BrokenPipeError) and not is_training
    return is_pipe and any(map(streams.has_lost_reader, (sys.stdout, sys.stderr)))


def flushed(code: int) -> int:
    """The exit code, once all is written.

    Of a command that was done it is UNREAD where nobody read it to its end, INTERNAL_ERROR where
    what it said could not be written: a full disk. A run's steps do not depend on its console.
    """
    try:
        sys.stdout.flush()
    except OSError as error:
        streams.silence(sys.stdout)
        if not is_training and not code:
            if isinstance(error, BrokenPipeError):
                code = UNREAD
            elif error.errno not in streams.GONE:
                streams.tell(sys.stderr, f"error: standard output: {error}\n")
                code = INTERNAL_ERROR
    streams.tell(sys.stderr, "")
    return code


def describe(error: BaseException) -> tuple[int, str]:
    """Exit code and message: what a user did needs no traceback, nor does a disk that failed.

    A file that cannot be read or written is the user's to put right before training has begun;
    afterwards another attempt may do.
    """
    is_file = isinstance(error, OSError) and error.filename is not None  # The message names it.
    if is_file or isinstance(error, UserError):
        is_passing = is_training and (is_file or isinstance(error, Disruption))
        return INTERNAL_ERROR if is_passing else USER_ERROR, f"error: {error}"
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, ""
    return INTERNAL_ERROR, "".join(traceback.format_exception(error)).rstrip()


def is_launched() -> bool:
    """Whether a launcher started this rank, and hears what it leaves."""
    return bool(os.environ.get("TORCHELASTIC_ERROR_FILE"))


def is_started_anew() -> bool:
    """Whether this rank goes on with what others have begun under the same launchers."""
    return bool(os.environ.get(STARTED))


def report(message: str, is_user_error: bool) -> None:
    """Print the message; under the launcher leave it there, which prints the first one.

    The ranks of a job mostly fail together, each for its own reason: the first is the cause.
    """
    if not is_launched():
        if message:
            streams.tell(sys.stderr, message + "\n")
        return
    details = {"timestamp": str(int(time.time())), "moment": time.time(), "user": is_user_error}
    leave({"message": {"message": message, "extraInfo": details}})


def leave(note: dict[str, Any]) -> None:
    """Leave a note for the launcher, if there is one: torchrun gives each rank a file for it."""
    if is_launched():
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(note))
