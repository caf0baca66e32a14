"""Names the slow ranks and links of a pipeline, from its timeline.

A rank is slow if its actions take longer per layer than those of the other ranks on the same
microbatch. A link is slow if its messages are late although their receiver already waits or looks
for them: the lateness of a receiver does not count. A link for which no rank ever waits is not
reported: it delays no rank.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from titan_dit.observe.timeline import Edge, Timeline
from titan_dit.schedules.action import Action, Kind

SLOW_RANK = 1.15
"""Minimum ratio to the other ranks' seconds per layer for a slow rank."""
SLOW_LINK = 5.0
"""Minimum ratio to the other links' latency for a slow link..."""
SLOW_LINK_FORWARDS = 0.25
"""... whose latency is also at least this share of a forward: less does not delay a step."""


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
    """Ranks that hold only the first or the last stage, whose costs are known less well."""

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
