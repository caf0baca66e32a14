"""Pipeline schedules as data: the actions of every rank, the messages between them, requirements.

An `Order` lists, for every rank, its actions in sequence: computation only. Communication follows:
the input of a stage is the output of the previous one (forward) or of the next one (backward). A
`Schedule` has a program for every rank, from which `placement.pipeline_order` makes the order.

A message has the name of the action that makes it: F, or I for an input gradient, also that of a
full backward. Both ends of a channel read its sequence from the order: messages need no tags.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeAlias

from titan_dit.config import catalog
from titan_dit.config.dotted_names import look_up
from titan_dit.config.section import UserError, show


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
"""Stage of a weight gradient in a program: the oldest pending one of any stage."""

Program: TypeAlias = Iterable[tuple[Kind, int]]
"""A rank's actions without microbatches: (kind, stage)."""


def with_microbatches(program: Program) -> tuple[Action, ...]:
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


def num_stages_of(order: Order) -> int:
    """Number of stages of an order."""
    return 1 + max(action.stage for actions in order for action in actions)


def num_microbatches_of(order: Order) -> int:
    """Number of microbatches of an order."""
    return 1 + max(action.microbatch for actions in order for action in actions)


def ranks_of(order: Order) -> dict[int, int]:
    """Stage -> its pipeline rank."""
    return {action.stage: rank for rank, actions in enumerate(order) for action in actions}


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


Channels: TypeAlias = Mapping[tuple[int, int], tuple[Action, ...]]
"""(source, target) -> the messages of one rank to another, in the sequence in which it sends."""


def inputs_of(action: Action, num_stages: int) -> Iterator[Action]:
    """The inputs of an action; a full backward counts as BACKWARD_INPUT."""
    kind, stage, _ = action
    if kind is Kind.FORWARD:
        if stage > 0:
            yield action._replace(stage=stage - 1)
    elif kind is Kind.BACKWARD_WEIGHT:
        yield action._replace(kind=Kind.BACKWARD_INPUT)
    else:
        yield action._replace(kind=Kind.FORWARD)
        if stage < num_stages - 1:
            yield action._replace(kind=Kind.BACKWARD_INPUT, stage=stage + 1)


def output_of(action: Action) -> Action:
    """The output of an action; a full backward's is an input gradient, too."""
    return action._replace(kind=Kind.BACKWARD_INPUT) if action.kind is Kind.BACKWARD else action


def reader_of(message: Action) -> int:
    """The stage that uses an output, possibly outside the pipeline; the stage itself for W."""
    onward = {Kind.FORWARD: 1, Kind.BACKWARD_INPUT: -1}
    return message.stage + onward.get(message.kind, 0)


def neighbours(stage_ranks: Sequence[int], *, joins_ends: bool = False) -> set[tuple[int, int]]:
    """(source, target) of all channels: the ranks of neighbouring stages, both ways.

    `joins_ends`: also the ranks of the first and the last stage.
    """
    pairs = [*pairwise(stage_ranks), *([(stage_ranks[0], stage_ranks[-1])] if joins_ends else [])]
    forward = {pair for pair in pairs if pair[0] != pair[1]}
    return forward | {(target, source) for source, target in forward}


def channels(order: Order, stage_ranks: Sequence[int]) -> Channels:
    """The messages between ranks; `stage_ranks`: the rank of each stage."""
    found: defaultdict[tuple[int, int], list[Action]] = defaultdict(list)
    for source, actions in enumerate(order):
        for action in actions:
            message = output_of(action)
            reader = reader_of(message)
            if 0 <= reader < len(stage_ranks) and stage_ranks[reader] != source:
                found[source, stage_ranks[reader]].append(message)
    return {pair: tuple(messages) for pair, messages in found.items()}


class Call(NamedTuple):
    """One call of a rank's host in a step."""

    what: Literal["run", "receive", "send"]
    """Compute an action; post the receive of a message; send one."""
    action: Action
    """The action, or the one that makes the message."""


Calls: TypeAlias = tuple[tuple[Call, ...], ...]
"""The calls of every pipeline rank, in sequence."""

KEY = "[pipeline] schedule"


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A row of `catalog.SCHEDULES`, or a user's own."""

    program: Callable[[int, int, int, int], Program] | None = None
    """(rank, ranks p, microbatches m, stages per rank v) -> the rank's actions, in order. Each
    stage takes its microbatches by number."""
    actions: Callable[[int, int, int], Order] | None = None
    """Instead of `program`: (p, m, v) -> the actions of all ranks."""
    torch: str | Callable[..., Any] | None = None
    """torch's class with the same order, by its name for `get_schedule_class` or itself."""
    v_shaped: bool = False
    """Rank r holds stages r and 2p - 1 - r. Otherwise r, r + p, r + 2p, ..."""
    interleaved: bool = False
    """A rank holds [pipeline] virtual_stages stages. Otherwise two if V-shaped, else one."""
    splits_backward: bool = False
    """Input and weight gradients are computed separately."""
    check: Callable[[str, int, int, int], None] = lambda name, p, m, v: None
    """(name, p, m, v): raise UserError if the schedule does not support m microbatches."""

    def __post_init__(self) -> None:
        """Raise UserError for two placements, or without exactly one of `program` and `actions`."""
        if self.v_shaped and self.interleaved:
            raise UserError(f"{KEY}: a Schedule is v_shaped and interleaved. Set one of them.")
        if (self.program is None) == (self.actions is None):
            raise UserError(f"{KEY}: a Schedule takes a program or actions. Give one of them.")


def schedule_of(name: str) -> Schedule:
    """The schedule that [pipeline] schedule names; UserError if there is none."""
    found = look_up(catalog.SCHEDULES, KEY, name)
    if isinstance(found, type):
        # Lazy: only a user's own class of torch's needs torch.distributed.pipelining here.
        from titan_dit.pipeline.schedules import torch_classes

        if torch_classes.is_torch_class(found):
            return torch_classes.schedule_from(name, found)
    if not isinstance(found, Schedule):
        what = found.__name__ if isinstance(found, type) else f"a {type(found).__name__}"
        raise UserError(
            f"{KEY}={show(name)} is {what}. Name a Schedule, or a class derived from torch's "
            "PipelineScheduleSingle or PipelineScheduleMulti."
        )
    return found
