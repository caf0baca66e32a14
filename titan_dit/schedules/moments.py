"""The moments of a pipeline rank that make up a timeline; an executor calls a `Mark` at each."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import TypeAlias

from titan_dit.schedules.action import Kind


class Moment(StrEnum):
    """An event on a rank; in brackets the second argument of `Mark`."""

    STEP = "step"
    """A training step begins (its number)."""
    OUTSIDE = "outside"
    """Something outside the pipeline begins (its name), such as the optimizer, or ends (None)."""
    STARTS = "starts"
    """A training pass over the microbatches begins (None). Without it no later moment counts."""
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


Mark: TypeAlias = Callable[[Moment, object], None]
"""(moment, its subject): called when it happens."""

CAUSE = {Kind.FORWARD: "input", Kind.BACKWARD_INPUT: "gradient"}
"""Kind of a message -> the cause of waiting for it."""


def unmarked(moment: Moment, what: object) -> None:
    """A `Mark` that does nothing: no timeline is recorded."""
