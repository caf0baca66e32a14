"""An orderly stop: a signal to any rank, one agreement of all of them, at the end of a step."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from enum import IntEnum
from types import TracebackType

import torch
import torch.distributed as dist

from titan_dit.launcher.failure import INTERRUPTED, LEFT, is_launched
from titan_dit.launcher.signals import Listener
from titan_dit.system import streams

PATIENCE_S = 5.0
"""torchrun sends SIGTERM to the ranks that outlive another one, and SIGKILL 30 s later. A rank that
waits for the dead one, in a collective that does not fail, leaves after this long, or after twice
the time of the last step if that is more."""


class Reason(IntEnum):
    """Why the ranks stop; of several the greatest holds."""

    NONE = 0
    REGROUP = 1
    """SIGUSR2, from our launcher: a node has come, all start again with it."""
    STOP = 2
    """SIGTERM, SIGUSR1, SIGHUP, SIGINT: the job is to end."""
    HOOK = 3
    """A user's hook has raised."""


REASONS = {
    signal.SIGUSR2: Reason.REGROUP,
    signal.SIGTERM: Reason.STOP,
    signal.SIGUSR1: Reason.STOP,
    signal.SIGHUP: Reason.STOP,
    signal.SIGINT: Reason.STOP,
}


class StopRequest:
    """`while ... and not stop.agreed(): step()`, on every rank alike.

    At each boundary a flag is reduced over the ranks in the background and read at the next one: no
    rank waits for the slowest, none for its device. A stop comes one step after the signal.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        # A group of its own: the order of its collectives is no one else's business.
        self.group = dist.new_group(backend="gloo") if num_ranks > 1 else None
        self.work: dist.Work | None = None
        self.flag = torch.zeros((), dtype=torch.int32)
        self.heard: list[signal.Signals] = []
        self.own = Reason.NONE
        self.reason = Reason.NONE
        self.boundaries = 0
        self.moment, self.step_s = time.monotonic(), 0.0
        self.listener = Listener(REASONS, self.hear)

    def __enter__(self) -> StopRequest:
        """From here on the signals are requests."""
        self.listener.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Signals are what they were; under the launcher a late request is ignored."""
        if kind is None and self.work:
            self.work.wait()
        was_active = self.listener.is_active
        self.listener.__exit__(kind, error, trace)
        if kind is None and was_active and is_launched():
            for late in (signal.SIGUSR1, signal.SIGUSR2):
                signal.signal(late, signal.SIG_IGN)

    @property
    def wanted(self) -> Reason:
        """What this rank has been asked for, or asks for itself."""
        return max([self.own, *(REASONS[number] for number in self.heard)])

    @property
    def exit_code(self) -> int:
        """What a process without a launcher ends with: 130 after Ctrl-C, as shells expect."""
        asked_by_hand = self.reason and signal.SIGINT in self.heard and not is_launched()
        return INTERRUPTED if asked_by_hand else 0

    @property
    def by(self) -> str:
        """What asked: " by SIGTERM". Under the launcher nothing: it has told the person."""
        return f" by {self.heard[0].name}" if self.heard and not is_launched() else ""

    def ask(self, reason: Reason) -> None:
        """Let all ranks stop for a reason of this one."""
        self.own = reason

    def agreed(self) -> bool:
        """Whether all ranks stop here. Every rank calls, before each step."""
        self.boundaries += 1
        now = time.monotonic()
        self.moment, self.step_s = now, now - self.moment
        if self.group is None:
            self.reason = self.wanted
            return bool(self.reason)
        if self.work:
            self.work.wait()
            self.reason = Reason(int(self.flag))
        self.work = None
        if not self.reason:
            self.flag = torch.tensor(int(self.wanted), dtype=torch.int32)
            self.work = dist.all_reduce(
                self.flag, dist.ReduceOp.MAX, group=self.group, async_op=True
            )
        return bool(self.reason)

    def hear(self, number: signal.Signals) -> None:
        """In the listener's thread, whatever the main thread does."""
        if not is_launched():
            self.hear_by_hand(number)
            return
        self.heard.append(number)
        if self.boundaries <= 1:
            os._exit(LEFT)  # Not one step done: nothing to save.
        if number == signal.SIGTERM:
            threading.Thread(target=self.leave_if_stuck, daemon=True).start()

    def hear_by_hand(self, number: signal.Signals) -> None:
        """Without a launcher: Ctrl-C twice leaves at once."""
        if number == signal.SIGINT:
            if signal.SIGINT in self.heard:
                os._exit(INTERRUPTED)
            again = "\nfinishing the step and saving; Ctrl-C again leaves at once\n"
            streams.tell(sys.stderr, again)
        self.heard.append(number)

    def leave_if_stuck(self) -> None:
        """Leave unless steps go on, or our launcher says that all ranks were asked to stop."""
        before = self.boundaries
        time.sleep(max(PATIENCE_S, 2 * self.step_s))
        is_order = signal.SIGUSR1 in self.heard
        if not is_order and self.boundaries == before and not self.reason:
            os._exit(LEFT)
