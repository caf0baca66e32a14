"""Graceful stop: after a signal to any rank, all ranks stop after the same step."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import deque
from enum import IntEnum

import torch
from torch import Tensor

from titan_dit.ranks.failure import INTERRUPTED, LEAVING, LEFT, is_launched, show
from titan_dit.ranks.signals import Listener
from titan_dit.system import stdio
from titan_dit.system.host_copy import HostCopy

PATIENCE_S = 5.0
"""A rank blocked in a collective with a dead rank leaves after this long, or after twice the last
step time if longer. torchrun sends SIGTERM to the surviving ranks."""
KILLED_S = 25.0
"""Upper limit of that time for torchrun's SIGTERM: it sends SIGKILL 30 s later."""


class Reason(IntEnum):
    """Why the ranks stop; the largest value wins."""

    NONE = 0
    REGROUP = 1
    """SIGUSR2 from the launcher: restart with another set of nodes."""
    STOP = 2
    """SIGTERM, SIGUSR1, SIGHUP, SIGINT: end the job."""
    HOOK = 3
    """A user's hook raised."""


DIGIT = 2**17
"""Each rank adds DIGIT**(reason - 1) to the flag: the digits of the sum count the ranks per reason,
exactly in fp64 for fewer than DIGIT ranks."""

REASONS = {
    signal.SIGUSR2: Reason.REGROUP,
    signal.SIGTERM: Reason.STOP,
    signal.SIGUSR1: Reason.STOP,
    signal.SIGHUP: Reason.STOP,
    signal.SIGINT: Reason.STOP,
}


class StopRequest:
    """`while ... and not stop.agreed(): step()` on every rank.

    Each step sums `flag()` over all ranks beside its gradient norm, on their device. `agreed` reads
    the sum of the last step on a CPU, and of the one before it on a GPU, which has the last step to
    work on meanwhile. All ranks stop after the same step: that in which one is asked, or the next
    one on a CPU; up to two later on a GPU. A single rank stops after the step in which it is asked.
    """

    def __init__(self, num_ranks: int, device: torch.device) -> None:
        assert num_ranks < DIGIT
        self.num_ranks, self.device = num_ranks, device
        # Pinned: the device reads it when it comes to the sum, later than the host queues it.
        pinned = device.type == "cuda"
        self.asked = torch.zeros((), dtype=torch.float64, pin_memory=pinned)
        self.summed: Tensor | None = None
        self.copies: deque[HostCopy] = deque()
        self.lag = int(device.type == "cuda")
        self.heard: list[signal.Signals] = []
        self.own = Reason.NONE
        self.reason = Reason.NONE
        self.boundaries = 0
        self.moment, self.step_s = time.monotonic(), 0.0
        self.listener = Listener(REASONS, self.hear)
        self.kept = False
        """True while another stage follows: the end of the block then goes on listening."""

    def __enter__(self) -> StopRequest:
        """Treat the signals as stop requests."""
        if not self.listener.is_active:
            self.listener.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Restore the handlers; under the launcher ignore late requests."""
        if self.kept and kind is None and not self.reason:
            return
        was_active = self.listener.is_active
        self.listener.__exit__()
        if kind is None and was_active and is_launched():
            for late in (signal.SIGUSR1, signal.SIGUSR2):
                signal.signal(late, signal.SIG_IGN)

    @property
    def wanted(self) -> Reason:
        """This rank's reason to stop: from signals or `ask`.

        SIGTERM after SIGUSR2 is the launcher's, which restarts the ranks: no request to stop. The
        launcher's own request is SIGUSR1.
        """
        heard = list(self.heard)
        # Sent together, SIGTERM is heard last: see `signals.TOGETHER_S`.
        if signal.SIGUSR2 in heard:
            restart = heard.index(signal.SIGUSR2)
            heard = [n for i, n in enumerate(heard) if i < restart or n != signal.SIGTERM]
        return max([self.own, *(REASONS[number] for number in heard)])

    @property
    def exit_code(self) -> int:
        """Exit code without a launcher: 130 after Ctrl-C, as shells expect."""
        asked_by_hand = self.reason and signal.SIGINT in self.heard and not is_launched()
        return INTERRUPTED if asked_by_hand else 0

    @property
    def by(self) -> str:
        """Console text such as " by SIGTERM"; empty under the launcher, which prints its own."""
        return f" by {self.heard[0].name}" if self.heard and not is_launched() else ""

    def ask(self, reason: Reason) -> None:
        """Request a stop of all ranks from this one."""
        self.own = reason
        self.tell()

    def tell(self) -> None:
        """Write this rank's reason where `flag` reads it."""
        self.asked.fill_(DIGIT ** (self.wanted - 1) if self.wanted else 0)

    def flag(self) -> Tensor | None:
        """An fp64 scalar to sum over all ranks in this step, in place; None on a single rank."""
        if self.num_ranks > 1:
            self.summed = torch.empty_like(self.asked, device=self.device)
            self.summed.copy_(self.asked, non_blocking=True)
        return self.summed

    def agreed(self) -> bool:
        """Return True if all ranks stop here. Call before each step."""
        self.boundaries += 1
        now = time.monotonic()
        self.moment, self.step_s = now, now - self.moment
        if self.num_ranks == 1:
            self.reason = self.wanted
        if self.summed is not None:
            self.copies.append(HostCopy(self.summed))
            self.summed = None
        if len(self.copies) > self.lag:
            self.reason = reason_of(float(self.copies.popleft().read()))
        if self.reason:
            show(LEAVING)
        return bool(self.reason)

    def hear(self, number: signal.Signals) -> None:
        """Handle a signal in the listener's thread."""
        if not is_launched():
            self.hear_by_hand(number)
            return
        self.heard.append(number)
        self.tell()
        if self.boundaries <= 1:
            os._exit(LEFT)  # No step finished: nothing to save.
        if number == signal.SIGTERM:
            threading.Thread(target=self.leave_if_stuck, daemon=True).start()

    def hear_by_hand(self, number: signal.Signals) -> None:
        """Handle a signal without a launcher; a second Ctrl-C exits immediately."""
        if number == signal.SIGINT:
            if signal.SIGINT in self.heard:
                os._exit(INTERRUPTED)
            again = "\nfinishing the step and saving; Ctrl-C again exits at once\n"
            stdio.write(sys.stderr, again)
        self.heard.append(number)
        self.tell()

    def leave_if_stuck(self) -> None:
        """Wait two step times, at least PATIENCE_S; exit if no step ends, unless all ranks stop.

        After the launcher's request to stop it stays, until GRACE ends: a step may be long. It
        leaves nevertheless if torchrun ends the ranks, because one of them has failed meanwhile.
        """
        before, patience = self.boundaries, max(PATIENCE_S, 2 * self.step_s)
        time.sleep(min(patience, KILLED_S) if self.is_ended_by_torchrun else patience)
        stays = signal.SIGUSR1 in self.heard and not self.is_ended_by_torchrun
        if not stays and self.boundaries == before and not self.reason:
            os._exit(LEFT)

    @property
    def is_ended_by_torchrun(self) -> bool:
        """True if the launcher's last word was SIGUSR2, and not SIGUSR1, its request to stop."""
        words = [n for n in self.heard if n in (signal.SIGUSR1, signal.SIGUSR2)]
        return words[-1:] == [signal.SIGUSR2]


def reason_of(total: float) -> Reason:
    """The largest reason in the sum of all ranks' flags."""
    return max(reason for reason in Reason if not reason or total >= DIGIT ** (reason - 1))
