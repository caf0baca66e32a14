"""Actions of a pipeline rank: forward or backward of one microbatch through one stage.

An `Order` lists, for every rank, its actions in sequence: computation only. Communication follows:
a stage's input is the output of the previous stage (forward) or of the next one (backward).
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple, TypeAlias


class Kind(StrEnum):
    """The four computations; zero-bubble schedules split B into I and W (arXiv:2401.10241)."""

    FORWARD = "F"
    BACKWARD = "B"
    """The full backward: gradients of the input and of the weights."""
    BACKWARD_INPUT = "I"
    """Gradient of the input, for which the previous stage waits."""
    BACKWARD_WEIGHT = "W"
    """Gradient of the weights, for which no stage waits: it fills bubbles."""


class Action(NamedTuple):
    """One computation of one stage (in model order) on one microbatch."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        """Stage, kind, microbatch: "2F0", as torch writes it."""
        return f"{self.stage}{self.kind}{self.microbatch}"


Order: TypeAlias = tuple[tuple[Action, ...], ...]
"""The actions of every pipeline rank, in sequence."""

ANY_STAGE = -1
"""In a program: the oldest pending weight gradient of any stage."""

Program: TypeAlias = Iterable[tuple[Kind, int]]
"""A rank's actions without microbatches: (kind, stage)."""


def number(program: Program) -> tuple[Action, ...]:
    """Number the microbatches of a program: each stage takes them in order.

    A weight gradient takes the oldest microbatch that has an input gradient but no weight gradient
    yet: the oldest of its stage, or with ANY_STAGE of all stages.
    """
    counts: dict[tuple[bool, int], int] = {}
    waiting: list[Action] = []
    actions: list[Action] = []
    for kind, stage in program:
        if kind is Kind.BACKWARD_WEIGHT:
            due = next(a for a in waiting if stage in (a.stage, ANY_STAGE))
            waiting.remove(due)
            actions.append(due._replace(kind=kind))
            continue
        key = (kind is Kind.FORWARD, stage)
        action = Action(kind, stage, counts.get(key, 0))
        counts[key] = action.microbatch + 1
        actions.append(action)
        if kind is Kind.BACKWARD_INPUT:
            waiting.append(action)
    return tuple(actions)


def peak_activations(order: Order) -> tuple[int, ...]:
    """Each rank's peak number of (microbatch, stage) pairs whose activations it holds.

    Activations live from the forward to the full backward or weight gradient. With v stages per
    rank a pair has 1/v of the activations of a microbatch on a rank with one stage.
    """
    peaks = []
    for actions in order:
        held = peak = 0
        for action in actions:
            if action.kind is Kind.FORWARD:
                held += 1
                peak = max(peak, held)
            elif action.kind is not Kind.BACKWARD_INPUT:
                held -= 1
        peaks.append(peak)
    return tuple(peaks)
