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

from titan_dit.section import UserError

USER_ERROR, INTERNAL_ERROR, INTERRUPTED = 2, 1, 130


def guarded(main: Callable[[], None]) -> None:
    """Run `main` and end the process; whatever it raises is reported once.

    The end is os._exit, not the end of Python: there a broken process group can wait for ever, and
    a thread of a whole one has been seen to abort a run that was done.
    """
    code = 0
    try:
        main()
        atexit._run_exitfuncs()  # What loggers and worker processes have asked for.
    except (Exception, KeyboardInterrupt) as error:
        code, message = describe(error)
        report(message, is_user_error=code == USER_ERROR)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def describe(error: BaseException) -> tuple[int, str]:
    """Exit code and message: what a user did needs no traceback, everything else does."""
    if isinstance(error, UserError):
        return USER_ERROR, f"error: {error}"
    if isinstance(error, OSError) and error.filename is not None:
        # A file that cannot be read or written: the message names it.
        return USER_ERROR, f"error: {error}"
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, ""
    return INTERNAL_ERROR, "".join(traceback.format_exception(error)).rstrip()


def report(message: str, is_user_error: bool) -> None:
    """Print the message; under torchrun hand it to the launcher, which prints the first one.

    The ranks of a job mostly fail together, each for its own reason: the first is the cause.
    """
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    # The launcher only sees the last attempt: one that will be restarted speaks for itself.
    restarts, limit = (
        int(os.environ.get(f"TORCHELASTIC_{name}", "0"))
        for name in ("RESTART_COUNT", "MAX_RESTARTS")
    )
    if message and (not error_file or restarts < limit):
        sys.stderr.write(message + "\n")
    if not error_file:
        return
    details = {"timestamp": str(int(time.time())), "moment": time.time(), "user": is_user_error}
    Path(error_file).write_text(json.dumps({"message": {"message": message, "extraInfo": details}}))
