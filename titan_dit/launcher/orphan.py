"""Ends a rank with its launcher, so that an orphan does not keep the GPU."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from titan_dit.launcher.failure import LEFT, is_launched

PR_SET_PDEATHSIG = 1


def die_with_launcher() -> None:
    """Have Linux kill this process when its launcher dies."""
    if not is_launched() or sys.platform != "linux":
        return
    launcher = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        os._exit(LEFT)
