"""Events of a pipeline rank, recorded over a window of steps.

An executor calls a `Mark` at each event. GPU times come from CUDA events.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import NamedTuple, TypeAlias

import torch

from titan_dit.pipeline.schedules.schedule import Kind


class PipelineEvent(StrEnum):
    """An event on a rank; in brackets the second argument of `Mark`."""

    STEP = "step"
    """A training step begins (its number)."""
    OUTSIDE = "outside"
    """Something outside the pipeline begins (its name), such as the optimizer, or ends (None)."""
    STARTS = "starts"
    """A training pass over the microbatches begins (None). Without it no later event counts."""
    FINISHED = "finished"
    """The pass is over (None)."""
    DECIDES = "decides"
    """The rank begins to choose its next action (None); until BEGINS or WAITS."""
    WAITS = "waits"
    """The rank begins to wait (a cause: "input", "gradient", "memory"), or stops (None)."""
    ALLOWS = "allows"
    """A message of another rank may arrive from now on (the message): its receive is posted."""
    ARRIVED = "arrived"
    """A message of another rank is here (the message)."""
    BEGINS = "begins"
    """The computation of an action begins; its inputs have arrived (the action)."""
    ENDS = "ends"
    """The computation of an action ends; its output is not sent yet (the action)."""
    SENDS = "sends"
    """An output leaves for another rank (the message)."""


Mark: TypeAlias = Callable[[PipelineEvent, object], None]
"""(event, its subject): called when it happens."""

CAUSE = {Kind.FORWARD: "input", Kind.BACKWARD_INPUT: "gradient"}
"""Kind of a message -> the cause of waiting for it."""


def unmarked(event: PipelineEvent, what: object) -> None:
    """A `Mark` that does nothing: no timeline is recorded."""


class Noted(NamedTuple):
    """An event, with the rank's clock in nanoseconds."""

    event: PipelineEvent
    what: object
    at_ns: float


class Recorder:
    """Records the events of this rank; `mark` is a `Mark`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.mark: Mark = self.mark_device if device.type == "cuda" else self.mark_host
        self.notes: list[tuple[PipelineEvent, object, int]] = []
        self.cuda_events: list[tuple[PipelineEvent, object, torch.cuda.Event]] = []
        self.begun: tuple[torch.cuda.Event, int] | None = None

    def begin(self) -> None:
        """Discard earlier events and begin a window. Waits for the device."""
        self.notes, self.cuda_events = [], []
        if self.device.type == "cuda":
            self.begun = self.anchor()

    def mark_host(self, event: PipelineEvent, what: object) -> None:
        """Note an event at the host's time."""
        self.notes.append((event, what, time.perf_counter_ns()))

    def mark_device(self, event: PipelineEvent, what: object) -> None:
        """Note an event at the device's time, known later."""
        cuda_event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        cuda_event.record()
        self.cuda_events.append((event, what, cuda_event))

    def anchor(self) -> tuple[torch.cuda.Event, int]:
        """A CUDA event and the host's time of it. Waits for the device."""
        cuda_event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(self.device)
        cuda_event.record()
        cuda_event.synchronize()
        return cuda_event, time.perf_counter_ns()

    def read(self) -> list[Noted]:
        """End the window and return its events, in sequence. Waits for the device."""
        if self.device.type != "cuda":
            return in_sequence([Noted(*note) for note in self.notes])
        assert self.begun
        (first, first_ns), (last, last_ns) = self.begun, self.anchor()
        # The device's clock runs at a rate of its own.
        scale = (last_ns - first_ns) / first.elapsed_time(last)
        noted = [
            Noted(event, what, first_ns + scale * first.elapsed_time(cuda_event))
            for event, what, cuda_event in self.cuda_events
        ]
        return in_sequence(noted)


def in_sequence(noted: Sequence[Noted]) -> list[Noted]:
    """The events, with times that never decrease."""
    found: list[Noted] = []
    for note in noted:
        at_ns = max(note.at_ns, found[-1].at_ns) if found else note.at_ns
        found.append(note._replace(at_ns=at_ns))
    return found
