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

from titan_dit.section import UserError

USER_ERROR, INTERNAL_ERROR, INTERRUPTED = 2, 1, 130
HUNG, LEFT = 124, 143
"""A rank that took no step in time; one that was told to leave before it had done anything, or
because another had died."""
STARTED = "TITAN_DIT_STARTED"
"""Set by the launcher for ranks of a job that had ranks before, on this node or on others."""

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
    try:
        code = main() or 0
        atexit._run_exitfuncs()  # What loggers and worker processes have asked for.
    except (Exception, KeyboardInterrupt) as error:
        code, message = describe(error)
        report(message, is_user_error=code == USER_ERROR)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


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
            sys.stderr.write(message + "\n")
        return
    details = {"timestamp": str(int(time.time())), "moment": time.time(), "user": is_user_error}
    leave({"message": {"message": message, "extraInfo": details}})


def leave(note: dict[str, Any]) -> None:
    """Leave a note for the launcher, if there is one: torchrun gives each rank a file for it."""
    if is_launched():
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(note))
