"""The timeline of a pipeline as text and costs: predicted and measured times, slow ranks, links."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from titan_dit.observe.suspects import Suspects
from titan_dit.observe.timeline import COMPUTING, IDLE, OUTSIDE, Done, Pass, Timeline
from titan_dit.schedules import costs_file
from titan_dit.schedules.action import Action
from titan_dit.schedules.costs_file import MeasuredCosts
from titan_dit.schedules.messages import output_of
from titan_dit.schedules.replay import Taken, replay
from titan_dit.schedules.simulator import TimedAction


def lines(timeline: Timeline, suspects: Suspects) -> list[str]:
    """The whole text."""
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
    """A line on every link."""
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


def taken(one: Pass, done: Done) -> Taken:
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
    """A column per rank, in milliseconds per step; kinds that no rank has are left out."""
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
        links=timeline.links,
        step_s=statistics.median(map(timeline.length, range(timeline.num_passes))),
    )


def write_costs(path: Path, timeline: Timeline) -> None:
    """Write the costs file, which `pipeline plan` reads."""
    costs_file.write(path, costs(timeline))
