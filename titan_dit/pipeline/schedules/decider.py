"""Run-time order: chooses a pipeline rank's next action from the messages that have arrived.

The planned order sets the rules. It names every action, the kinds of each backward (B, or I and W)
and the maximum of activations that a rank holds. A `Decider` only lets a rank run another action
while the planned one cannot run:

- Each stage runs its forwards, its backwards and its weight gradients in the planned sequence, so
  that every gradient is the same sum in the same sequence as in the planned order.
- The k-th forward of the rank's plan may start once k < released + window. `released` counts the
  finished B and W, `window` is the planned peak of held activations, times `memory`.

There is no deadlock. Take the first action, in the planned execution of all ranks, that is not
done: all before it are. Its inputs have been sent, each of its stage's sequences has reached it,
and if it is a forward, the window is open: the plan held no more than its peak at this point, so
k < planned released + peak, and at least as much has been released. A limit on what is held
(held < window) would deadlock instead: forwards that came early fill the memory, and the one
forward for which the other ranks wait finds no room.

Between I and W a microbatch holds its activations and the gradients of many of them: it counts one
and a half times. A weight gradient runs before an action that would exceed the planned peak of
this sum, times `memory`. It waits for nothing, so this causes no deadlock. If none can run, the sum
is exceeded: in dualpipev by the gradients of one microbatch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from enum import StrEnum
from itertools import accumulate

from titan_dit.pipeline.schedules.schedule import (
    Action,
    Kind,
    Order,
    inputs_of,
    output_of,
    peak_activations,
)

GRADIENTS_AHEAD = 1
"""Maximum unfinished backwards of a stage before the one whose gradient may arrive."""


GROWTH = {
    Kind.FORWARD: 2,
    Kind.BACKWARD: -2,
    Kind.BACKWARD_INPUT: 1,
    Kind.BACKWARD_WEIGHT: -3,
}
"""Memory that an action adds, in halves of the activations of a (microbatch, stage) pair.
The gradients between I and W are 0.44 of them in a DiT (tests/distributed/live_bytes.py)."""


class Waiting(StrEnum):
    """Why a rank has nothing to run."""

    INPUT = "input"
    """No forward's input is here, and no backward is due."""
    GRADIENT = "gradient"
    """A stage has run forward and waits for the gradient of its output."""
    MEMORY = "memory"
    """A forward's input is here, but the window is full."""


def windows(order: Order, memory: float) -> tuple[int, ...]:
    """Each rank's window: its planned peak of activations x `memory`, rounded down."""
    # 25 x 1.16 is 28.999999999999996 in floating point.
    return tuple(int(peak * memory + 1e-9) for peak in peak_activations(order))


def peak_halves(actions: Sequence[Action]) -> int:
    """Peak memory of a plan, in halves of a pair's activations; see `GROWTH`."""
    return max(accumulate((GROWTH[action.kind] for action in actions), initial=0))


_KINDS = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
"""The lanes of a stage; a full backward is in the last two."""
_LANES_OF = {kind: (kind,) for kind in _KINDS} | {Kind.BACKWARD: _KINDS[1:]}


class _Lane:
    """Actions that a stage runs in sequence, of which the first `done` are done."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.done = 0

    @property
    def head(self) -> Action | None:
        """The next action; None if all are done."""
        return self.actions[self.done] if self.done < len(self.actions) else None


def _lanes(actions: Sequence[Action]) -> dict[Kind, dict[int, _Lane]]:
    """The lanes of every stage, in the planned sequence."""
    lanes: dict[Kind, dict[int, _Lane]] = {kind: defaultdict(_Lane) for kind in _KINDS}
    for action in actions:
        for kind in _LANES_OF[action.kind]:
            lanes[kind][action.stage].actions.append(action)
    return lanes


class Decider:
    """Decides what one rank of a planned order runs next.

    `arrived` and `done` report events; `next` changes nothing and may be called at any time. With
    memory 1 it returns the ready action that comes first in the plan. Above 1 forwards and
    backwards alternate, and a weight gradient runs only if neither of them can.
    """

    def __init__(self, actions: Sequence[Action], num_stages: int, memory: float = 1.0) -> None:
        """`actions`: the rank's plan; `num_stages`: stages of the whole pipeline."""
        self.num_stages, self.memory = num_stages, memory
        (self.window,) = windows((tuple(actions),), memory)
        self.released = 0
        """Number of finished B and W."""
        self._halves, self._most_halves = 0, peak_halves(actions) * memory
        self._position = {action: place for place, action in enumerate(actions)}
        self._inputs = {action: tuple(inputs_of(action, num_stages)) for action in actions}
        forwards = [action for action in actions if action.kind is Kind.FORWARD]
        self._number = {action: number for number, action in enumerate(forwards)}
        self._lanes = _lanes(actions)
        self._stages = sorted({action.stage for action in actions})
        self._made: set[Action] = set()
        self._num_done = 0
        self._last_was_forward = False
        self._posted: dict[tuple[Kind, int], int] = {}

    @property
    def finished(self) -> bool:
        """True once every action is done."""
        return self._num_done == len(self._position)

    @property
    def held(self) -> int:
        """(Microbatch, stage) pairs whose activations the rank holds."""
        return sum(lane.done for lane in self._lanes[Kind.FORWARD].values()) - self.released

    def arrived(self, message: Action) -> None:
        """Record another rank's message, named by the action that made it (F or I)."""
        self._made.add(message)

    def done(self, action: Action) -> None:
        """Record a finished action, and its output for the rank's other stages."""
        self._made.add(output_of(action))
        self._num_done += 1
        self._halves += GROWTH[action.kind]
        for kind in _LANES_OF[action.kind]:
            lane = self._lanes[kind][action.stage]
            assert lane.head == action, f"{action} is not the next of its stage"
            lane.done += 1
        self.released += action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
        if action.kind is not Kind.BACKWARD_WEIGHT:
            self._last_was_forward = action.kind is Kind.FORWARD

    def next(self) -> Action | Waiting:
        """The action to run now, or the cause of waiting. Raises IndexError if finished."""
        if self.finished:
            raise IndexError("Every action is done.")
        ready = [action for stage in self._stages for action in self.ready_of(stage)]
        if not ready:
            return self._cause()
        key = self._position.__getitem__ if self.memory == 1 else self._turn
        return self._with_room(min(ready, key=key), ready)

    def may_receive(self) -> list[Action]:
        """Messages of other ranks that may arrive from now on, each returned once.

        Messages of a lane (source stage, kind) are in sequence. An input may arrive if its forward
        is within the window; each stage allows one more. A gradient may arrive once its forward is
        done, if at most `GRADIENTS_AHEAD` unfinished backwards of its stage come before it. So the
        next message that a stage needs is always allowed: no rank blocks itself.
        """
        allowed: list[Action] = []
        for stage in self._stages:
            if stage > 0 and stage - 1 not in self._stages:
                allowed += self._more(Kind.FORWARD, stage)
            if stage < self.num_stages - 1 and stage + 1 not in self._stages:
                allowed += self._more(Kind.BACKWARD_INPUT, stage)
        return allowed

    def ready_of(self, stage: int) -> list[Action]:
        """The stage's actions that can run now: at most one of each lane."""
        found = []
        forward, backward, weights = (self._lanes[kind][stage].head for kind in _KINDS)
        if forward and self._in_window(forward) and self._has_inputs(forward):
            found.append(forward)
        # A full backward comes after the weight gradients that are planned before it.
        fits = backward and (backward.kind is not Kind.BACKWARD or backward == weights)
        if backward and fits and self._has_inputs(backward):
            found.append(backward)
        if weights and weights.kind is not Kind.BACKWARD and self._has_inputs(weights):
            found.append(weights)
        return found

    def _with_room(self, action: Action, ready: Sequence[Action]) -> Action:
        """`action`, or a ready weight gradient if `action` would exceed the memory."""
        if self._halves + GROWTH[action.kind] <= self._most_halves:
            return action
        weights = [other for other in ready if other.kind is Kind.BACKWARD_WEIGHT]
        return min(weights, key=self._turn, default=action)

    def _turn(self, action: Action) -> tuple[int, int]:
        """Sort key with spare memory: other direction than last, same direction, weights."""
        if action.kind is Kind.BACKWARD_WEIGHT:
            turn = 2
        else:
            turn = int((action.kind is Kind.FORWARD) == self._last_was_forward)
        return turn, self._position[action]

    def _cause(self) -> Waiting:
        """Why no action is ready."""
        heads = [self._lanes[Kind.FORWARD][stage].head for stage in self._stages]
        if any(head and self._has_inputs(head) for head in heads):
            return Waiting.MEMORY
        backwards = [self._lanes[Kind.BACKWARD_INPUT][stage].head for stage in self._stages]
        own = (head and head._replace(kind=Kind.FORWARD) for head in backwards)
        return Waiting.GRADIENT if any(f in self._made for f in own) else Waiting.INPUT

    def _in_window(self, forward: Action) -> bool:
        return self._number[forward] < self.released + self.window

    def _has_inputs(self, action: Action) -> bool:
        return self._made.issuperset(self._inputs[action])

    def _more(self, kind: Kind, stage: int) -> list[Action]:
        """The next messages of a stage's inputs (F) or gradients (I) that may arrive."""
        lane = self._lanes[kind][stage]
        may = self._input_may_arrive if kind is Kind.FORWARD else self._gradient_may_arrive
        posted = self._posted.get((kind, stage), 0)
        more = []
        source = stage - 1 if kind is Kind.FORWARD else stage + 1
        while posted < len(lane.actions) and may(lane, posted):
            more.append(Action(kind, source, lane.actions[posted].microbatch))
            posted += 1
        self._posted[kind, stage] = posted
        return more

    def _input_may_arrive(self, lane: _Lane, place: int) -> bool:
        # The input before it is within the window: at most this one is beyond.
        return place == 0 or self._in_window(lane.actions[place - 1])

    def _gradient_may_arrive(self, lane: _Lane, place: int) -> bool:
        forward = lane.actions[place]._replace(kind=Kind.FORWARD)
        return place <= lane.done + GRADIENTS_AHEAD and forward in self._made
