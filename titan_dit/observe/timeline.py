"""The timeline of a pipeline: what every rank did in each moment of a window of steps.

Every moment of a rank has one kind: computing F, B, I or W; idle in a pass, by cause; or outside
the passes. So the kinds of a rank add up to its wall time. All times are seconds on the first
rank's clock since the window began there.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, TypeAlias

from titan_dit.observe.recorder import Noted
from titan_dit.schedules.action import Action, Kind, Order
from titan_dit.schedules.moments import Moment

COMPUTING = tuple(str(kind) for kind in Kind)
WAITING = ("input", "gradient", "memory")
IDLE = (*WAITING, "decision", "rest")
"""Waiting for an input, for a gradient, for memory; deciding; sending, gathering and the loop."""
OUTSIDE = ("data wait", "optimizer", "outside")
KINDS = (*COMPUTING, *IDLE, *OUTSIDE)

GOES_ON = (Moment.DECIDES, Moment.WAITS, Moment.BEGINS, Moment.FINISHED)
"""Moments that show that a rank has sent its last output and goes on."""

WAITED = 1e-4
"""Seconds; a shorter wait may be for a message that had already arrived."""

Edge: TypeAlias = tuple[int, int]
"""(source rank, target rank)"""


class Span(NamedTuple):
    """A rank's time of one kind."""

    kind: str
    start: float
    end: float


class Done(NamedTuple):
    """A measured action."""

    action: Action
    start: float
    end: float
    free: float
    """Time at which the rank had sent its output and could go on."""


class Arrival(NamedTuple):
    """The observed arrival of a message."""

    at: float
    waiting_since: float | None
    """Time since which the rank waited; None if it did not."""
    absent: float | None
    """Time at which the rank last looked and the message had not arrived; None without a look."""

    def bounds(self, left: float, allowed: float) -> tuple[float, float]:
        """(least, most) seconds that the message travelled, if it left at time `left`.

        `allowed`: time at which its receive was posted. A message that left before was held up
        until then, and until its sender knew: its travel time is unknown.
        """
        most = max(0.0, self.at - left)
        if allowed > left:
            return 0.0, most
        if self.waiting_since is not None:
            # Taking a message that has already arrived also takes a moment.
            waited = self.at - self.waiting_since
            if self.waiting_since <= left or waited > max(WAITED, most / 4):
                return most, most
        return max(0.0, self.absent - left) if self.absent is not None else 0.0, most


@dataclass
class Pass:
    """One pass over the microbatches on one rank."""

    start: float
    ready: float = 0.0
    """Time at which the rank first waited or computed."""
    end: float = 0.0
    actions: list[Done] = field(default_factory=list)
    sent: dict[Action, float] = field(default_factory=dict)
    allowed: dict[Action, float] = field(default_factory=dict)
    arrived: dict[Action, Arrival] = field(default_factory=dict)
    deciding: list[tuple[float, float]] = field(default_factory=list)


@dataclass
class RankTimeline:
    """One rank's window."""

    rank: int
    spans: list[Span] = field(default_factory=list)
    """Without gaps, from the first step to the end of the window."""
    steps: list[tuple[int, float]] = field(default_factory=list)
    """(Step, start)."""
    passes: list[Pass] = field(default_factory=list)

    def seconds(self) -> dict[str, float]:
        """Seconds by kind."""
        found = dict.fromkeys(KINDS, 0.0)
        for kind, start, end in self.spans:
            found[kind] += end - start
        return found

    @property
    def wall(self) -> float:
        """Seconds from the first step to the end of the window."""
        return self.spans[-1].end - self.spans[0].start if self.spans else 0.0

    def held(self) -> Iterator[tuple[float, int]]:
        """(Time, microbatches held over all stages of this rank), whenever that changes."""
        count = 0
        for one in self.passes:
            for (kind, _, _), start, end, _ in one.actions:
                if kind is Kind.FORWARD:
                    count += 1
                    yield start, count
                elif kind is not Kind.BACKWARD_INPUT:
                    count -= 1
                    yield end, count


class Reader:
    """Turns the moments of one rank into its timeline."""

    def __init__(self, rank: int, seconds: Callable[[float], float]) -> None:
        self.found, self.seconds = RankTimeline(rank), seconds
        self.kind, self.since = "", 0.0
        self.one: Pass | None = None
        self.is_sending = False
        """True between the end of an action and the rank's next moment of `GOES_ON`."""
        self.waited: tuple[float, float] | None = None
        """(start, end) of the last wait; None after a computation."""
        self.looked: tuple[float | None, float | None] = None, None
        """Times of the rank's last and second-last look for messages."""

    def read(self, noted: Sequence[Noted]) -> RankTimeline:
        """The timeline of a window; it begins with a STEP and ends with the last moment."""
        first = next(i for i, note in enumerate(noted) if note.moment is Moment.STEP)
        for moment, what, at_ns in noted[first:]:
            at = self.seconds(at_ns)
            if self.one is None:
                self.outside(moment, what, at)
            else:
                self.inside(self.one, moment, what, at)
        self.turn(self.kind, self.seconds(noted[-1].at_ns))
        return self.found

    def turn(self, kind: str, at: float) -> None:
        """End the current span, and begin one of another kind."""
        if self.kind and at > self.since:
            self.found.spans.append(Span(self.kind, self.since, at))
        self.kind, self.since = kind, at

    def outside(self, moment: Moment, what: object, at: float) -> None:
        """Read a moment outside a pass; moments of previews and validations are ignored."""
        if moment is Moment.STEP:
            assert isinstance(what, int)
            self.found.steps.append((what, at))
            self.turn("outside", at)
        elif moment is Moment.OUTSIDE:
            self.turn(str(what) if what in OUTSIDE else "outside", at)
        elif moment is Moment.STARTS:
            self.one, self.looked = Pass(at), (None, None)
            self.turn("rest", at)

    def inside(self, one: Pass, moment: Moment, what: object, at: float) -> None:
        """Read a moment of a pass."""
        if not one.ready and moment in GOES_ON:
            one.ready = at
        if self.is_sending and moment in GOES_ON:
            one.actions[-1], self.is_sending = one.actions[-1]._replace(free=at), False
        if self.kind == "decision" and moment in (Moment.WAITS, Moment.BEGINS):
            one.deciding.append((self.since, at))
        match moment:
            case Moment.DECIDES:
                self.looked = at, self.looked[0]
                self.turn("decision", at)
            case Moment.WAITS:
                self.waited = (self.since, at) if self.kind in WAITING else self.waited
                self.turn("rest" if what is None else str(what), at)
            case Moment.BEGINS:
                assert isinstance(what, Action)
                self.waited = None
                self.turn(str(what.kind), at)
            case Moment.ENDS:
                assert isinstance(what, Action)
                one.actions.append(Done(what, self.since, at, at))
                self.is_sending = True
                self.turn("rest", at)
            case Moment.FINISHED:
                one.end, self.one = at, None
                self.found.passes.append(one)
                self.turn("outside", at)
            case _:
                self.message(one, moment, what, at)

    def message(self, one: Pass, moment: Moment, what: object, at: float) -> None:
        """Read a moment at which a message leaves, is allowed or arrives."""
        if isinstance(what, Action) and moment is Moment.SENDS:
            one.sent[what] = at
        elif isinstance(what, Action) and moment is Moment.ALLOWS:
            one.allowed[what] = at
        elif isinstance(what, Action) and moment is Moment.ARRIVED:
            since = self.since if self.kind in WAITING else None
            if since is None and self.waited and at - self.waited[1] < WAITED:
                since = self.waited[0]
            one.arrived[what] = Arrival(at, since, self.looked[since is None])


@dataclass(frozen=True)
class Timeline:
    """A window of a whole pipeline."""

    ranks: tuple[RankTimeline, ...]
    stage_ranks: tuple[int, ...]
    sizes: tuple[float, ...]
    """Expected cost of each stage, in layers."""
    planned: Order
    num_microbatches: int

    @property
    def first_step(self) -> int:
        """The first step of the window."""
        return self.ranks[0].steps[0][0]

    @property
    def last_step(self) -> int:
        """The last step of the window."""
        return self.ranks[0].steps[-1][0]

    @property
    def num_passes(self) -> int:
        """Passes that every rank has finished."""
        return min(len(rank.passes) for rank in self.ranks)

    def passes(self, number: int) -> list[Pass]:
        """A pass on every rank."""
        return [rank.passes[number] for rank in self.ranks]

    def span_of(self, number: int) -> tuple[float, float]:
        """From the moment the first rank is ready to the end of the last action."""
        ready = min(one.ready for one in self.passes(number))
        return ready, max(one.actions[-1].end for one in self.passes(number))

    def length(self, number: int) -> float:
        """Seconds of a pass over all ranks."""
        start, end = self.span_of(number)
        return end - start

    @cached_property
    def typical(self) -> int:
        """The pass of median length."""
        return sorted(range(self.num_passes), key=self.length)[(self.num_passes - 1) // 2]

    def order(self, number: int) -> Order:
        """The actions of a pass, as they were run."""
        return tuple(tuple(done.action for done in one.actions) for one in self.passes(number))

    @cached_property
    def durations(self) -> dict[Action, list[float]]:
        """Seconds of each action, in all passes."""
        found: defaultdict[Action, list[float]] = defaultdict(list)
        for number in range(self.num_passes):
            for one in self.passes(number):
                for action, start, end, _ in one.actions:
                    found[action].append(end - start)
        return dict(found)

    def messages(self) -> Iterator[tuple[int, int, Action, tuple[float, float], Arrival]]:
        """Yield (source, target, message, (left, allowed), arrival) of all; times in seconds."""
        for number in range(self.num_passes):
            passes = self.passes(number)
            sent = {m: (rank, at) for rank, one in enumerate(passes) for m, at in one.sent.items()}
            for target, one in enumerate(passes):
                for message, arrival in one.arrived.items():
                    if message in sent:
                        source, left = sent[message]
                        allowed = one.allowed.get(message, left)
                        yield source, target, message, (left, allowed), arrival

    @cached_property
    def latencies(self) -> dict[Edge, list[tuple[float, float]]]:
        """(Least, most) seconds that each message of an edge travelled."""
        found: defaultdict[Edge, list[tuple[float, float]]] = defaultdict(list)
        for source, target, _, since, arrival in self.messages():
            found[source, target].append(arrival.bounds(*since))
        return dict(sorted(found.items()))

    @cached_property
    def links(self) -> dict[Edge, float]:
        """Edge -> median seconds of a message, without the receiver's lateness.

        An edge whose receiver seldom waits for a message gets the usual seconds of the other edges,
        or those of its fastest message if that is faster.
        """
        known = {}
        for edge, bounds in self.latencies.items():
            sure = [most for least, most in bounds if least >= most / 2]
            if len(sure) >= self.num_passes:
                known[edge] = statistics.median(sure)
        usual = statistics.median_low(known.values()) if known else 0.0
        fastest = {edge: min(m for _, m in bounds) for edge, bounds in self.latencies.items()}
        return {edge: known.get(edge, min(most, usual)) for edge, most in fastest.items()}
