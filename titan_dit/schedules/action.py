"""What a pipeline rank does: forward or backward of one microbatch through one stage.

An order gives every rank its actions, one after another. It holds computation only: messages follow
from it, because a stage's input is the output of the stage before (forward) or after (backward).
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple, TypeAlias


class Kind(StrEnum):
    """The four computations, by the letters of the zero-bubble paper (arXiv:2401.10241 sec. 2)."""

    FORWARD = "F"
    BACKWARD = "B"
    """The full backward: gradients of the input and of the weights."""
    BACKWARD_INPUT = "I"
    """Gradient of the input, which the stage before waits for."""
    BACKWARD_WEIGHT = "W"
    """Gradient of the weights, which nobody waits for: it fills idle time."""


class Action(NamedTuple):
    """One computation. Stages count along the model, microbatches along the rank's batch."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        """Stage, kind, microbatch: "2F0", as torch writes it."""
        return f"{self.stage}{self.kind}{self.microbatch}"


Order: TypeAlias = tuple[tuple[Action, ...], ...]
"""For every pipeline rank its actions, in sequence."""

ANY_STAGE = -1
"""In a program: the weight gradient that has waited longest, whichever its stage."""

Program: TypeAlias = Iterable[tuple[Kind, int]]
"""Actions of a rank without their microbatches: (kind, stage)."""


def number(program: Program) -> tuple[Action, ...]:
    """Give every action its microbatch: each stage takes its microbatches in order.

    A full backward and an input gradient count as one; a weight gradient belongs to the oldest
    input gradient (of its stage, or of any) that has none yet.
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
    """The most microbatches that each rank holds at once, counted per stage.

    A stage's activations live from its forward until its full backward or weight gradient. A rank
    with v stages holds v times as many, each 1/v as large as those of a rank with one.
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
