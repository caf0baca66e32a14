"""Signals: a listener thread beside a blocked main thread, and the signal of a dead parent."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Collection
from types import FrameType

from titan_dit.ranks.failure import LEFT, is_launched

PR_SET_PDEATHSIG = 1
TOGETHER_S = 0.05
"""Signals that come so soon after a SIGTERM are heard before it. Of several that are pending the
kernel runs the handlers in an order of its own, and the launcher says SIGUSR2 before SIGTERM."""
PARENT = "TITAN_DIT_PARENT"
"""Environment variable of a rank: the pid of the process that started it."""


def die_with_launcher() -> None:
    """Have Linux kill this process when its launcher dies: an orphan would keep the GPU."""
    if not is_launched() or sys.platform != "linux":
        return
    launcher = os.getppid()
    # It may have died before. A process that the rank starts has another parent.
    started_by = os.environ.pop(PARENT, str(launcher))
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if str(os.getppid()) != started_by:
        os._exit(LEFT)


class Listener:
    """Within the block, call `heard` in a thread for each of the given signals.

    Ignored signals stay ignored (nohup). Inactive outside the main thread, where Python allows no
    handlers.
    """

    def __init__(
        self, signals: Collection[signal.Signals], heard: Callable[[signal.Signals], None]
    ) -> None:
        self.signals, self.heard = frozenset(signals), heard
        self.is_active = False

    def __enter__(self) -> Listener:
        """Install the handlers and start the thread."""
        if threading.current_thread() is not threading.main_thread():
            return self
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.writer, False)
        self.handlers = {
            number: signal.signal(number, nothing)
            for number in self.signals
            if signal.getsignal(number) != signal.SIG_IGN
        }
        self.wakeup = signal.set_wakeup_fd(self.writer, warn_on_full_buffer=False)
        # A forked data worker would write its signals into this process's pipe.
        os.register_at_fork(after_in_child=self.forget)
        self.is_active = True
        self.thread = threading.Thread(target=self.listen, name="signals", daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the handlers and stop the thread."""
        if not self.is_active:
            return
        self.is_active = False
        signal.set_wakeup_fd(self.wakeup)
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        os.write(self.writer, b"\0")
        self.thread.join()
        os.close(self.reader)
        os.close(self.writer)

    def listen(self) -> None:
        """Read signal numbers from the wakeup fd, written by Python's C handler."""
        while numbers := os.read(self.reader, 64):
            if signal.SIGTERM in numbers and select.select([self.reader], [], [], TOGETHER_S)[0]:
                numbers += os.read(self.reader, 64)
            for number in sorted(numbers, key=is_late):
                if number == 0:
                    return
                if number in self.handlers:
                    self.heard(signal.Signals(number))

    def forget(self) -> None:
        """Stop writing signals into the parent's pipe; a forked child calls it."""
        if self.is_active:
            signal.set_wakeup_fd(-1)


def is_late(number: int) -> tuple[bool, bool]:
    """Key of a sort: SIGTERM behind other signals, and the end of the thread behind all."""
    return number == 0, number == signal.SIGTERM


def nothing(number: int, frame: FrameType | None) -> None:
    """Python-level handler: the thread does the work. A forked child ignores the signal."""
