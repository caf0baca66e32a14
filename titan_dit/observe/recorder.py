"""Record the moments of a pipeline rank over a window of steps.

On a CPU a moment has the host's time. On a GPU it is an event in the stream, whose time is read
after the window: the host does not wait within it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from titan_dit.schedules.moments import Mark, Moment


class Noted(NamedTuple):
    """A moment, with the rank's clock in nanoseconds."""

    moment: Moment
    what: object
    at_ns: float


class Recorder:
    """Records the moments of this rank; `mark` is a `Mark`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.mark: Mark = self.mark_device if device.type == "cuda" else self.mark_host
        self.notes: list[tuple[Moment, object, int]] = []
        self.events: list[tuple[Moment, object, torch.cuda.Event]] = []
        self.begun: tuple[torch.cuda.Event, int] | None = None

    def begin(self) -> None:
        """Discard earlier moments and begin a window. Waits for the device."""
        self.notes, self.events = [], []
        if self.device.type == "cuda":
            self.begun = self.anchor()

    def mark_host(self, moment: Moment, what: object) -> None:
        """Note a moment at the host's time."""
        self.notes.append((moment, what, time.perf_counter_ns()))

    def mark_device(self, moment: Moment, what: object) -> None:
        """Note a moment at the device's time, known later."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self.events.append((moment, what, event))

    def anchor(self) -> tuple[torch.cuda.Event, int]:
        """An event and the host's time of it. Waits for the device."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(self.device)
        event.record()
        event.synchronize()
        return event, time.perf_counter_ns()

    def read(self) -> list[Noted]:
        """End the window and return its moments, in sequence. Waits for the device."""
        if self.device.type != "cuda":
            return in_sequence([Noted(*note) for note in self.notes])
        assert self.begun
        (first, first_ns), (last, last_ns) = self.begun, self.anchor()
        # The device's clock runs at a rate of its own.
        scale = (last_ns - first_ns) / first.elapsed_time(last)
        noted = [
            Noted(moment, what, first_ns + scale * first.elapsed_time(event))
            for moment, what, event in self.events
        ]
        return in_sequence(noted)


def in_sequence(noted: Sequence[Noted]) -> list[Noted]:
    """The moments, with times that never decrease."""
    found: list[Noted] = []
    for note in noted:
        at_ns = max(note.at_ns, found[-1].at_ns) if found else note.at_ns
        found.append(note._replace(at_ns=at_ns))
    return found
