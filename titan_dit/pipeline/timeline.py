"""The timeline of a pipeline: what every rank did at each time of a window of steps.

Its console lines, its Chrome trace (https://ui.perfetto.dev opens it), its picture, the slow rank
or link that it names, and pictures of simulated orders on the same axis.
"""

from __future__ import annotations

import gzip
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from PIL import Image, ImageDraw, ImageFont

from titan_dit.observe.curve import GRID, INK, OTHER, save_png, ticks
from titan_dit.pipeline.events import Noted, PipelineEvent
from titan_dit.pipeline.schedules import files
from titan_dit.pipeline.schedules.files import MeasuredCosts
from titan_dit.pipeline.schedules.schedule import (
    Action,
    Kind,
    Order,
    num_microbatches_of,
    output_of,
)
from titan_dit.pipeline.schedules.simulator import Simulation, Taken, TimedAction, replay
from titan_dit.system.files import replacing

COMPUTING = tuple(str(kind) for kind in Kind)
WAITING = ("input", "gradient", "memory")
IDLE = (*WAITING, "decision", "rest")
"""Idle times: waiting for an input, a gradient or memory; deciding; the rest (sending, gathering,
the loop)."""
OUTSIDE = ("data wait", "optimizer", "outside")
KINDS = (*COMPUTING, *IDLE, *OUTSIDE)

GOES_ON = (PipelineEvent.DECIDES, PipelineEvent.WAITS, PipelineEvent.BEGINS, PipelineEvent.FINISHED)
"""Events that show that a rank has sent its last output."""

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
    """Time at which the rank had sent its output."""


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
        until then, so its travel time is unknown.
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
class PipelinePass:
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
    """The timeline of one rank over the window."""

    rank: int
    spans: list[Span] = field(default_factory=list)
    """Spans without gaps, from the first step to the end of the window."""
    steps: list[tuple[int, float]] = field(default_factory=list)
    """(Step, start)."""
    passes: list[PipelinePass] = field(default_factory=list)

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


class TimelineReader:
    """Turns the events of one rank into its timeline."""

    def __init__(self, rank: int, seconds: Callable[[float], float]) -> None:
        self.found, self.seconds = RankTimeline(rank), seconds
        self.kind, self.since = "", 0.0
        self.one: PipelinePass | None = None
        self.is_sending = False
        """True between the end of an action and the rank's next event of `GOES_ON`."""
        self.waited: tuple[float, float] | None = None
        """(start, end) of the last wait; None after a computation."""
        self.looked: tuple[float | None, float | None] = None, None
        """Times of the rank's last and second-last look for messages."""

    def read(self, noted: Sequence[Noted]) -> RankTimeline:
        """The timeline of a window; it begins with a STEP and ends with the last event."""
        first = next(i for i, note in enumerate(noted) if note.event is PipelineEvent.STEP)
        for event, what, at_ns in noted[first:]:
            at = self.seconds(at_ns)
            if self.one is None:
                self.outside(event, what, at)
            else:
                self.inside(self.one, event, what, at)
        self.turn(self.kind, self.seconds(noted[-1].at_ns))
        return self.found

    def turn(self, kind: str, at: float) -> None:
        """End the current span, and begin one of another kind."""
        if self.kind and at > self.since:
            self.found.spans.append(Span(self.kind, self.since, at))
        self.kind, self.since = kind, at

    def outside(self, event: PipelineEvent, what: object, at: float) -> None:
        """Read an event outside a pass; events of previews and validations are ignored."""
        if event is PipelineEvent.STEP:
            assert isinstance(what, int)
            self.found.steps.append((what, at))
            self.turn("outside", at)
        elif event is PipelineEvent.OUTSIDE:
            self.turn(str(what) if what in OUTSIDE else "outside", at)
        elif event is PipelineEvent.STARTS:
            self.one, self.looked = PipelinePass(at), (None, None)
            self.turn("rest", at)

    def inside(self, one: PipelinePass, event: PipelineEvent, what: object, at: float) -> None:
        """Read an event of a pass."""
        if not one.ready and event in GOES_ON:
            one.ready = at
        if self.is_sending and event in GOES_ON:
            one.actions[-1], self.is_sending = one.actions[-1]._replace(free=at), False
        if self.kind == "decision" and event in (PipelineEvent.WAITS, PipelineEvent.BEGINS):
            one.deciding.append((self.since, at))
        match event:
            case PipelineEvent.DECIDES:
                self.looked = at, self.looked[0]
                self.turn("decision", at)
            case PipelineEvent.WAITS:
                self.waited = (self.since, at) if self.kind in WAITING else self.waited
                self.turn("rest" if what is None else str(what), at)
            case PipelineEvent.BEGINS:
                assert isinstance(what, Action)
                self.waited = None
                self.turn(str(what.kind), at)
            case PipelineEvent.ENDS:
                assert isinstance(what, Action)
                one.actions.append(Done(what, self.since, at, at))
                self.is_sending = True
                self.turn("rest", at)
            case PipelineEvent.FINISHED:
                one.end, self.one = at, None
                self.found.passes.append(one)
                self.turn("outside", at)
            case _:
                self.message(one, event, what, at)

    def message(self, one: PipelinePass, event: PipelineEvent, what: object, at: float) -> None:
        """Read an event at which a message leaves, is allowed or arrives."""
        if isinstance(what, Action) and event is PipelineEvent.SENDS:
            one.sent[what] = at
        elif isinstance(what, Action) and event is PipelineEvent.ALLOWS:
            one.allowed[what] = at
        elif isinstance(what, Action) and event is PipelineEvent.ARRIVED:
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

    def passes(self, number: int) -> list[PipelinePass]:
        """A pass on every rank."""
        return [rank.passes[number] for rank in self.ranks]

    def span_of(self, number: int) -> tuple[float, float]:
        """(start, end) of a pass: from the first ready rank to the end of the last action."""
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
        """Action -> its seconds in all passes."""
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
        """Edge -> median seconds of a message, without the receiver's delay.

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


Event: TypeAlias = dict[str, Any]
"""One entry of "traceEvents"; times in microseconds."""

COMPUTE, SEND, RECEIVE, DECISION = range(4)
TRACKS = ("compute", "send", "receive", "decision")
SHOWN = 0.1
"""Minimum microseconds of the slice at an arrow's end: a slice without length is not visible."""


def write_trace(path: Path, timeline: Timeline) -> None:
    """Write the trace, compressed."""
    with replacing(path) as aside, gzip.open(aside, "wt") as file:
        json.dump({"traceEvents": list(trace_events(timeline)), "displayTimeUnit": "ms"}, file)


def trace_events(timeline: Timeline) -> Iterator[Event]:
    """Yield all events of the trace."""
    # Clocks are known to microseconds: a rank may seem to begin just before the first one.
    origin = min(rank.spans[0].start for rank in timeline.ranks)
    for rank in timeline.ranks:
        stages = [str(s) for s, place in enumerate(timeline.stage_ranks) if place == rank.rank]
        yield from named(rank.rank, f"rank {rank.rank} (stages {', '.join(stages)})")
        yield from computed(rank, origin)
        yield from decided(rank, origin)
        for at, count in rank.held():
            yield counter(rank.rank, micro(at - origin), count)
    yield from trace_messages(timeline, origin)


def named(rank: int, name: str) -> Iterator[Event]:
    """Names and order of a process and its tracks."""
    yield {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": name}}
    yield {
        "ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}
    }  # fmt: skip
    for track, title in enumerate(TRACKS):
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": track, "args": {"name": title}}


def computed(rank: RankTimeline, origin: float) -> Iterator[Event]:
    """The compute track: actions, idle time by cause, time outside the pipeline, steps."""
    for one in rank.passes:
        for action, start, end, _ in one.actions:
            args = {"stage": action.stage, "microbatch": action.microbatch}
            yield sliced(rank.rank, COMPUTE, str(action), str(action.kind), start - origin,
                         end - start, args)  # fmt: skip
    for kind, start, end in rank.spans:
        if kind not in COMPUTING:
            category, name = ("outside", kind) if kind in OUTSIDE else ("idle", f"idle: {kind}")
            yield sliced(rank.rank, COMPUTE, name, category, start - origin, end - start, {})
    for step, at in rank.steps:
        yield {
            "ph": "i", "name": f"step {step}", "pid": rank.rank, "tid": COMPUTE, "s": "p",
            "ts": micro(at - origin),
        }  # fmt: skip


def decided(rank: RankTimeline, origin: float) -> Iterator[Event]:
    """The decision track."""
    for one in rank.passes:
        for start, end in one.deciding:
            yield sliced(
                rank.rank, DECISION, "decides", "decision", start - origin, end - start, {}
            )


def trace_messages(timeline: Timeline, origin: float) -> Iterator[Event]:
    """Sends, receives and the arrows between them.

    A message has a slice on its sender's track from when it leaves, and one on its receiver's track
    until it arrives; slices of a track do not overlap.
    """
    travels = sorted(travelled(timeline, origin))
    left_at: dict[int, float] = {}
    for travel in reversed(travels):
        end = min(travel.at, left_at.get(travel.source, travel.at))
        left_at[travel.source] = travel.left
        yield from arrowed(travel, "s", travel.source, travel.left, end - travel.left)
    arrived_at: dict[int, float] = {}
    for travel in sorted(travels, key=lambda travel: travel.at):
        start = max(travel.left, arrived_at.get(travel.target, travel.left))
        arrived_at[travel.target] = travel.at
        yield from arrowed(travel, "f", travel.target, start, travel.at - start)


class Travel(NamedTuple):
    """A message, and when it left one rank and arrived on another."""

    left: float
    at: float
    source: int
    target: int
    message: Action
    number: int
    """Number of its arrow."""


def travelled(timeline: Timeline, origin: float) -> Iterator[Travel]:
    """Yield all messages of the window."""
    for number, travel in enumerate(timeline.messages()):
        source, target, message, (left, _), arrival = travel
        # Clocks are known to microseconds: no message arrives before it left.
        at = max(arrival.at, left)
        yield Travel(left - origin, at - origin, source, target, message, number + 1)


def arrowed(travel: Travel, phase: str, rank: int, start: float, length: float) -> Iterator[Event]:
    """One end of a message: its slice and the end of its arrow ("s" or "f")."""
    args = {"message": str(travel.message), "ms": 1e3 * (travel.at - travel.left)}
    track, name = (SEND if phase == "s" else RECEIVE), str(travel.message)
    event = sliced(rank, track, name, "message", start, length, args)
    # Within the slice, which the arrow is bound to by time.
    ts = event["ts"] if phase == "s" else max(event["ts"], event["ts"] + event["dur"] - 0.001)
    yield {**event, "dur": max(SHOWN, event["dur"])}
    arrow = {"ph": phase, "id": travel.number, "name": "message", "cat": "message", "pid": rank}
    yield {**arrow, "tid": track, "ts": round(ts, 3), **({"bp": "e"} if phase == "f" else {})}


def sliced(
    rank: int,
    track: int,
    name: str,
    category: str,
    start: float,
    length: float,
    args: dict[str, Any],
) -> Event:
    """A slice of a track, from seconds."""
    return {
        "ph": "X", "name": name, "cat": category, "pid": rank, "tid": track,
        "ts": micro(start), "dur": micro(length), "args": args,
    }  # fmt: skip


def counter(rank: int, at: float, count: int) -> Event:
    """The microbatches that a rank holds from now on."""
    return {
        "ph": "C", "name": "microbatches held", "pid": rank, "ts": at, "args": {"held": count}
    }  # fmt: skip


def micro(seconds: float) -> float:
    """Microseconds, to a nanosecond."""
    return round(1e6 * seconds, 3)


SLOW_RANK = 1.15
"""Minimum ratio to the other ranks' seconds per layer for a slow rank."""
SLOW_LINK = 5.0
"""Minimum ratio to the other links' latency for a slow link..."""
SLOW_LINK_FORWARDS = 0.25
"""... whose latency is also at least this share of a forward; a shorter one delays no step."""


@dataclass(frozen=True)
class Suspects:
    """Slow ranks and links."""

    ranks: Mapping[int, float]
    """Rank -> ratio to the other ranks' seconds per layer."""
    links: Mapping[Edge, float]
    """Edge -> seconds of a message."""
    usual_link: float
    """Seconds of a message on the other links."""
    only_ends: frozenset[int] = frozenset()
    """Ranks that hold only the first or the last stage, whose costs are less certain."""

    def __bool__(self) -> bool:
        """True if a rank or a link is slow."""
        return bool(self.ranks or self.links)

    def lines(self) -> list[str]:
        """A line per suspect, or one that there is none."""
        lines = []
        for rank, ratio in self.ranks.items():
            why = ", or its end of the model costs more than planned" * (rank in self.only_ends)
            lines.append(f"slow rank: {rank}, {ratio:.2f} times the others' time per layer{why}")
        for (source, target), seconds in self.links.items():
            usual = f"the others' {1e3 * self.usual_link:.2f} ms"
            lines.append(
                f"slow link: {source} -> {target}, {1e3 * seconds:.2f} ms per message, {usual}"
            )
        return lines or ["no slow rank, no slow link"]


def suspects(timeline: Timeline) -> Suspects:
    """The slow ranks and links of a timeline."""
    ratios, only_ends = slowness(timeline.durations, timeline.stage_ranks, timeline.sizes)
    durations = timeline.durations.items()
    forwards = [s for action, times in durations if action.kind is Kind.FORWARD for s in times]
    forward, passes = statistics.median(forwards), timeline.num_passes
    slow, usual = slow_links(timeline.latencies, forward, passes)
    ranks = {rank: ratio for rank, ratio in ratios.items() if ratio >= SLOW_RANK}
    return Suspects(ranks, slow, usual, only_ends)


def slow_links(
    latencies: Mapping[Edge, Sequence[tuple[float, float]]], forward: float, passes: int
) -> tuple[dict[Edge, float], float]:
    """(slow links -> seconds of a message, usual seconds).

    A link is slow if none of its messages can have been fast, and at least one per pass was slow
    for certain: the arrival time of a message that its receiver took late is unknown. `latencies`:
    (least, most) seconds of each message. `forward`: seconds of a forward.
    """
    fastest = {edge: min(most for _, most in bounds) for edge, bounds in latencies.items()}
    if not fastest:
        return {}, 0.0
    usual = statistics.median_low(fastest.values())
    limit = max(SLOW_LINK_FORWARDS * forward, SLOW_LINK * usual)
    slow = {}
    for edge, bounds in latencies.items():
        surely = [least for least, _ in bounds if least > limit]
        if fastest[edge] > limit and len(surely) >= passes:
            slow[edge] = statistics.median(surely)
    return slow, usual


def slowness(
    durations: Mapping[Action, Sequence[float]],
    stage_ranks: Sequence[int],
    sizes: Sequence[float],
) -> tuple[dict[int, float], frozenset[int]]:
    """(rank -> ratio to the others' seconds per layer, ranks with only a first or last stage).

    The ratio is the median over microbatches, passes and directions: neither jitter nor
    microbatches of different lengths change it. The first and the last stage count only for ranks
    that hold no other stage.
    """
    ends = {0, len(stage_ranks) - 1}
    middle = {rank for stage, rank in enumerate(stage_ranks) if stage not in ends}
    per_layer: defaultdict[tuple[bool, int, int], defaultdict[int, list[float]]]
    per_layer = defaultdict(lambda: defaultdict(list))
    for stage, is_forward, microbatch, number, seconds in whole(durations):
        rank = stage_ranks[stage]
        if rank not in middle or stage not in ends:
            per_layer[is_forward, microbatch, number][rank].append(seconds / sizes[stage])
    ratios: defaultdict[int, list[float]] = defaultdict(list)
    for costs in per_layer.values():
        mean = {rank: statistics.mean(of_rank) for rank, of_rank in costs.items()}
        # One value for all ranks: it makes microbatches of different lengths comparable.
        usual = statistics.median(mean.values())
        for rank, cost in mean.items():
            ratios[rank].append(cost / usual if usual > 0 else 1.0)
    found = {rank: statistics.median(of_rank) for rank, of_rank in sorted(ratios.items())}
    # The faster of the middle two: with two ranks, the slow one must not raise the norm.
    others = statistics.median_low(found[rank] for rank in found if rank in middle or not middle)
    found = {rank: ratio / others for rank, ratio in found.items()}
    return found, frozenset(set(stage_ranks) - middle)


def whole(
    durations: Mapping[Action, Sequence[float]],
) -> Iterator[tuple[int, bool, int, int, float]]:
    """(Stage, True if forward, microbatch, pass, seconds); halves of a backward are added."""
    for action, times in durations.items():
        kind, stage, microbatch = action
        if kind is Kind.BACKWARD_WEIGHT:
            continue
        rest: Sequence[float] = [0.0] * len(times)
        if kind is Kind.BACKWARD_INPUT:
            rest = durations.get(action._replace(kind=Kind.BACKWARD_WEIGHT), rest)
        for number, (seconds, more) in enumerate(zip(times, rest, strict=True)):
            yield stage, kind is Kind.FORWARD, microbatch, number, seconds + more


def timeline_lines(timeline: Timeline, suspects: Suspects) -> list[str]:
    """Lines of the text file: header, prediction, table, ms per link, suspects."""
    first, last = timeline.first_step, timeline.last_step
    head = (
        f"pipeline timeline, steps {first} to {last}: {len(timeline.ranks)} ranks, "
        f"{len(timeline.stage_ranks)} stages, {timeline.num_microbatches} microbatches"
    )
    return [
        head,
        *predicted(timeline),
        "",
        *table(timeline),
        "",
        *messages(timeline),
        *suspects.lines(),
    ]


def messages(timeline: Timeline) -> Iterator[str]:
    """A line with the milliseconds per message of every link."""
    links = (f"{s} -> {t} {1e3 * seconds:.3f}" for (s, t), seconds in timeline.links.items())
    yield f"ms per message: {', '.join(links) or 'no messages'}"


def predicted(timeline: Timeline) -> Iterator[str]:
    """Lines that compare the measured pass with simulated ones."""
    numbers = range(timeline.num_passes)
    measured = statistics.mean(timeline.length(number) for number in numbers)
    as_run = statistics.mean(makespan(simulated(timeline, number)) for number in numbers)
    yield f"pass over the microbatches: {1e3 * measured:10.3f} ms measured"
    yield f"{'as it was run':26}: {1e3 * as_run:10.3f} ms simulated, {as_run / measured:.3f} of it"
    planned = replay(timeline.planned, median_seconds(timeline), timeline.links)
    ratio = makespan(planned) / measured
    yield f"{'as planned':26}: {1e3 * makespan(planned):10.3f} ms simulated, {ratio:.3f} of it"


def simulated(timeline: Timeline, number: int) -> tuple[TimedAction, ...]:
    """Simulate a pass with its measured actions and order, and the links' usual latency."""
    passes = timeline.passes(number)
    seconds = {done.action: taken(one, done) for one in passes for done in one.actions}
    origin = min(one.ready for one in passes)
    ready = [one.ready - origin for one in passes]
    return replay(timeline.order(number), seconds, timeline.links, ready)


def makespan(spans: tuple[TimedAction, ...]) -> float:
    """The end of the last action."""
    return max(span.end for span in spans)


def taken(one: PipelinePass, done: Done) -> Taken:
    """The measured seconds of an action."""
    left = one.sent.get(output_of(done.action), done.end)
    return Taken(done.end - done.start, left - done.start, done.free - done.start)


def median_seconds(timeline: Timeline) -> Mapping[Action, Taken]:
    """The median seconds of every action."""
    found: defaultdict[Action, list[Taken]] = defaultdict(list)
    for number in range(timeline.num_passes):
        for one in timeline.passes(number):
            for done in one.actions:
                found[done.action].append(taken(one, done))
    return {
        action: Taken(*map(statistics.median, zip(*times, strict=True)))
        for action, times in found.items()
    }


def table(timeline: Timeline) -> Iterator[str]:
    """Lines: a column per rank, in milliseconds per step; kinds that no rank has are left out."""
    count, ranks = len(timeline.ranks[0].steps), timeline.ranks
    seconds = [rank.seconds() for rank in ranks]

    def row(title: str, values: Iterable[float]) -> str:
        return f"{title:26}" + "".join(f"{1e3 * value / count:12.3f}" for value in values)

    def kinds(of: Sequence[str], prefix: str = "") -> Iterator[str]:
        for kind in of:
            if any(found[kind] for found in seconds):
                yield row(prefix + kind, (found[kind] for found in seconds))

    yield f"{'ms per step':26}" + "".join(f"{f'rank {rank.rank}':>12}" for rank in ranks)
    yield from kinds(COMPUTING)
    yield from kinds(IDLE, "idle: ")
    yield from kinds(OUTSIDE)
    yield row("all", (rank.wall for rank in ranks))
    yield row("bubble, measured", bubbles(timeline, timeline.length))
    yield row("bubble, simulated", bubbles(timeline, lambda n: makespan(simulated(timeline, n))))


def bubbles(timeline: Timeline, length: Callable[[int], float]) -> list[float]:
    """Each rank's idle seconds, given the length of each pass, measured or simulated."""
    total = sum(length(number) for number in range(timeline.num_passes))
    busy = (
        sum(end - start for one in rank.passes for _, start, end, _ in one.actions)
        for rank in timeline.ranks
    )
    return [total - of_rank for of_rank in busy]


def costs(timeline: Timeline) -> MeasuredCosts:
    """Median seconds of each action and link, and the order of the typical pass."""
    return MeasuredCosts(
        stage_ranks=timeline.stage_ranks,
        num_microbatches=timeline.num_microbatches,
        order=timeline.order(timeline.typical),
        seconds={action: taken.free for action, taken in median_seconds(timeline).items()},
        latencies=timeline.links,
        step_s=statistics.median(map(timeline.length, range(timeline.num_passes))),
    )


def write_costs(path: Path, timeline: Timeline) -> None:
    """Write the costs file; `pipeline plan` reads it."""
    files.write_costs(path, costs(timeline))


COMPUTED = {
    "F": ("forward", "#1f5aa6", "#4f8fd6"),
    "B": ("backward", "#1e8449", "#45b375"),
    "I": ("input gradient", "#148f8a", "#3fc0ba"),
    "W": ("weight gradient", "#d9a441", "#ecc887"),
}
"""Kind -> (label, colours on the stages of a rank in turn)."""
IDLE_COLOUR = {
    "input": ("idle: input", "#f6c9c2"),
    "gradient": ("idle: gradient", "#f3dcc8"),
    "memory": ("idle: memory", "#e3cdea"),
    "decision": ("idle: decision", "#f2a7a0"),
    "rest": ("idle: rest", "#ececec"),
    "over": ("its pass is over", "#d3d8de"),
}
WIDTH, LEFT, RIGHT = 1600, 110, 110
TOP, ROW, GAP = 96, 46, 10


class TimelinePicture:
    """The sheet, and where a moment is on it."""

    def __init__(self, timeline: Timeline, number: int, width_s: float | None = None) -> None:
        """`width_s`: seconds of the whole width; None takes the length of the pass."""
        self.timeline, self.number = timeline, number
        self.start, end = timeline.span_of(number)
        self.length = end - self.start
        self.width_s = width_s or self.length
        self.bottom = TOP + len(timeline.ranks) * (ROW + GAP)
        self.sheet = Image.new("RGB", (WIDTH, self.bottom + 84), "white")
        self.pen = ImageDraw.Draw(self.sheet)
        self.font, self.small = ImageFont.load_default(15), ImageFont.load_default(11)

    def x(self, at: float) -> int:
        """The pixel of a moment, within the row."""
        share = (at - self.start) / self.width_s if self.width_s else 0.0
        return LEFT + round(min(1.0, max(0.0, share)) * (WIDTH - LEFT - RIGHT))

    @property
    def idle(self) -> float:
        """Share of the pass in which the ranks compute nothing."""
        return 1 - sum(map(self.busy, self.timeline.ranks)) / len(self.timeline.ranks)

    def title(self) -> None:
        """Step, time and idle share."""
        steps = self.timeline.ranks[0].steps
        step = steps[min(self.number, len(steps) - 1)][0]
        self.heading(f"step {step}: {1e3 * self.length:.1f} ms, {self.idle:.0%} of it idle")

    def heading(self, title: str) -> None:
        """A title and the legend."""
        self.pen.text((LEFT, 14), title, fill=INK, font=ImageFont.load_default(20))
        passes = self.timeline.passes(self.number)
        kinds = {str(done.action.kind) for one in passes for done in one.actions}
        shown = [(name, colour) for kind, (name, colour, _) in COMPUTED.items() if kind in kinds]
        causes = {span.kind for rank in self.timeline.ranks for span in rank.spans}
        if min(one.end for one in passes) < self.start + self.length:
            causes.add("over")
        shown += [legend for cause, legend in IDLE_COLOUR.items() if cause in causes]
        x = LEFT
        for name, colour in shown:
            self.pen.rectangle((x, 58, x + 16, 74), fill=colour, outline=GRID)
            self.pen.text((x + 23, 66), name, fill=INK, font=self.font, anchor="lm")
            x += 23 + round(self.font.getlength(name)) + 24

    def busy(self, rank: RankTimeline) -> float:
        """Share of the pass in which a rank computes."""
        spans = rank.passes[self.number].actions
        return sum(end - start for _, start, end, _ in spans) / self.length

    def row(self, rank: RankTimeline, accused: bool) -> None:
        """A rank: idle time behind its actions."""
        top = TOP + rank.rank * (ROW + GAP)
        self.pen.text(
            (LEFT - 12, top + ROW // 2), f"rank {rank.rank}", anchor="rm",
            fill=OTHER if accused else INK, font=self.font,
        )  # fmt: skip
        edge = self.x(self.start + self.length)
        self.pen.rectangle((LEFT, top, edge, top + ROW), fill=IDLE_COLOUR["over"][1])
        for kind, start, end in rank.spans:
            if kind in IDLE_COLOUR and start < self.start + self.length and end > self.start:
                box = self.x(start), top, self.x(end), top + ROW
                self.pen.rectangle(box, fill=IDLE_COLOUR[kind][1])
        turns = [s for s, place in enumerate(self.timeline.stage_ranks) if place == rank.rank]
        for action, start, end, _ in rank.passes[self.number].actions:
            self.action(action, turns.index(action.stage) % 2, (self.x(start), self.x(end)), top)
        words = "slow" if accused else f"{self.busy(rank):.0%} busy"
        at = WIDTH - RIGHT + 12, top + ROW // 2
        self.pen.text(at, words, fill=OTHER if accused else INK, font=self.font, anchor="lm")

    def action(self, action: Action, turn: int, cut: tuple[int, int], top: int) -> None:
        """Draw one action, with its microbatch if there is room."""
        first, last = cut
        colour = COMPUTED[action.kind][1 + turn]
        # Its right pixel is left to the edge: neighbours of one colour stay apart.
        box = first, top + 3, max(first, last - 1), top + ROW - 3
        self.pen.rectangle(box, fill=colour)
        number = str(action.microbatch)
        if self.small.getlength(number) + 3 < last - first:
            middle = (first + last) / 2, top + ROW / 2
            self.pen.text(middle, number, fill="white", font=self.small, anchor="mm")

    def axis(self, unit: str = "ms", per_second: float = 1e3) -> None:
        """Time since the pass began."""
        self.pen.line((LEFT, self.bottom, WIDTH - RIGHT, self.bottom), fill=GRID)
        for value in ticks(0.0, per_second * self.width_s):
            x = self.x(self.start + value / per_second)
            self.pen.line((x, self.bottom, x, self.bottom + 6), fill=INK)
            text = f"{value:g}"
            self.pen.text((x, self.bottom + 10), text, fill=INK, font=self.font, anchor="ma")
        at = WIDTH - RIGHT + 12, self.bottom + 10
        self.pen.text(at, unit, fill=INK, font=self.font, anchor="la")


def draw_timeline(path: Path, timeline: Timeline, suspects: Suspects) -> None:
    """Write the picture of the pass of median length."""
    picture = TimelinePicture(timeline, timeline.typical)
    picture.title()
    for rank in timeline.ranks:
        picture.row(rank, rank.rank in suspects.ranks)
    picture.axis()
    lines = suspects.lines()
    text = "; ".join(lines[:2]) + (f"; {len(lines) - 2} more" if len(lines) > 2 else "")
    at = LEFT, picture.bottom + 48
    picture.pen.text(at, text, fill=OTHER if suspects else INK, font=picture.font)
    # A palette: a third of the bytes.
    save_png(picture.sheet.quantize(128), path)


UNIT = "forwards"
"""Unit of the time axis: a forward of one microbatch through the layers of one rank."""


def draw(path: Path, shown: Mapping[str, Simulation], stage_ranks: Sequence[int]) -> None:
    """Write the picture: a block of rows for each simulation, under its name."""
    longest = max(simulation.makespan for simulation in shown.values())
    blocks = [block(name, simulation, stage_ranks, longest) for name, simulation in shown.items()]
    sheet = Image.new("RGB", (WIDTH, sum(one.height for one in blocks)), "white")
    top = 0
    for one in blocks:
        sheet.paste(one, (0, top))
        top += one.height
    # A palette: a third of the bytes.
    save_png(sheet.quantize(128), path)


def block(
    name: str, simulation: Simulation, stage_ranks: Sequence[int], longest: float
) -> Image.Image:
    """The rows of one simulation."""
    picture = TimelinePicture(timeline_of(simulation, stage_ranks), 0, longest)
    picture.heading(f"{name}: {simulation.makespan:.1f} {UNIT}, {picture.idle:.1%} of it idle")
    for rank in picture.timeline.ranks:
        picture.row(rank, accused=False)
    picture.axis(UNIT, 1.0)
    return picture.sheet.crop((0, 0, WIDTH, picture.bottom + 44))


def timeline_of(simulation: Simulation, stage_ranks: Sequence[int]) -> Timeline:
    """A simulation as the timeline of one step; the action after a gap gives its cause."""
    order = simulation.order
    ranks = []
    for number in range(len(order)):
        own = [span for span in simulation.timeline if span.rank == number]
        done = [Done(span.action, span.start, span.end, span.end) for span in own]
        one = PipelinePass(0.0, 0.0, own[-1].end, done)
        gaps = list(gaps_of(own))
        ranks.append(RankTimeline(number, gaps, [(0, 0.0)], [one]))
    sizes = (1.0,) * len(stage_ranks)
    return Timeline(tuple(ranks), tuple(stage_ranks), sizes, order, num_microbatches_of(order))


def gaps_of(spans: Sequence[TimedAction]) -> Iterator[Span]:
    """The idle time before each action."""
    free = 0.0
    for _, action, start, end in spans:
        if start > free:
            yield Span("input" if action.kind is Kind.FORWARD else "gradient", free, start)
        free = end
