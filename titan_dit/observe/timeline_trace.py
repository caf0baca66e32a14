"""The timeline of a pipeline as one Chrome trace: https://ui.perfetto.dev opens it.

A process per rank. Its tracks: compute (with idle time by cause), send, receive, decision. Arrows
join a message's send and receive; a counter shows the microbatches that a rank holds.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from titan_dit.observe.timeline import COMPUTING, OUTSIDE, RankTimeline, Timeline
from titan_dit.schedules.action import Action

Event: TypeAlias = dict[str, Any]
"""One entry of "traceEvents"; times in microseconds."""

COMPUTE, SEND, RECEIVE, DECISION = range(4)
TRACKS = ("compute", "send", "receive", "decision")
SHOWN = 0.1
"""Minimum microseconds of the slice at an arrow's end: a slice without length is not visible."""


def write(path: Path, timeline: Timeline) -> None:
    """Write the trace, compressed."""
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": list(events(timeline)), "displayTimeUnit": "ms"}, file)


def events(timeline: Timeline) -> Iterator[Event]:
    """All events of the trace."""
    # Clocks are known to microseconds: a rank may seem to begin just before the first one.
    origin = min(rank.spans[0].start for rank in timeline.ranks)
    for rank in timeline.ranks:
        stages = [str(s) for s, place in enumerate(timeline.stage_ranks) if place == rank.rank]
        yield from named(rank.rank, f"rank {rank.rank} (stages {', '.join(stages)})")
        yield from computed(rank, origin)
        yield from decided(rank, origin)
        for at, count in rank.held():
            yield counter(rank.rank, micro(at - origin), count)
    yield from messages(timeline, origin)


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


def messages(timeline: Timeline, origin: float) -> Iterator[Event]:
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
    """All messages of the window."""
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
