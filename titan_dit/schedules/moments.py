"""The moments of a pipeline rank that a timeline is made of: who runs actions calls a `Mark`."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import TypeAlias

from titan_dit.schedules.action import Kind


class Moment(StrEnum):
    """What has just happened on a rank; in brackets what `Mark` is called with."""

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
    """The computation of an action, its inputs being here (the action)."""
    ENDS = "ends"
    """The computation of an action, before its output is sent (the action)."""
    SENDS = "sends"
    """An output leaves for another rank (the message)."""


Mark: TypeAlias = Callable[[Moment, object], None]
"""Told each moment as it happens."""

CAUSE = {Kind.FORWARD: "input", Kind.BACKWARD_INPUT: "gradient"}
"""Kind of a message -> the cause of waiting for it."""


def unmarked(moment: Moment, what: object) -> None:
    """The `Mark` of a rank that nobody watches."""
