"""A rank does not outlive its launcher: the GPU would be taken when the node starts anew."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from titan_dit.launcher.failure import LEFT, is_launched

PR_SET_PDEATHSIG = 1


def die_with_launcher() -> None:
    """Let Linux kill this process when the launcher is gone."""
    if not is_launched() or sys.platform != "linux":
        return
    launcher = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        os._exit(LEFT)
