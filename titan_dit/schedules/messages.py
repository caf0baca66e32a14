"""The messages of a pipeline order: which output goes to which rank, and in which sequence.

A message has the name of the action that makes it: F, or I for an input gradient, also that of a
full backward. Both ends of a channel read its sequence from the order: messages need no tags.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TypeAlias

from titan_dit.schedules.action import Action, Kind, Order

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
    """The output of an action; that of a full backward is an input gradient, too."""
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
