"""Simulated orders as a PNG, one below the other on one time axis, in the measured ones' style."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from PIL import Image

from titan_dit.observe.curve import save_png
from titan_dit.observe.timeline import (
    WIDTH,
    Done,
    PipelinePass,
    RankTimeline,
    Span,
    Timeline,
    TimelinePicture,
)
from titan_dit.schedules.action import Kind
from titan_dit.schedules.simulator import Simulation, TimedAction

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
    count = 1 + max(action.microbatch for actions in order for action in actions)
    sizes = (1.0,) * len(stage_ranks)
    return Timeline(tuple(ranks), tuple(stage_ranks), sizes, order, count)


def gaps_of(spans: Sequence[TimedAction]) -> Iterator[Span]:
    """The idle time before each action."""
    free = 0.0
    for _, action, start, end in spans:
        if start > free:
            yield Span("input" if action.kind is Kind.FORWARD else "gradient", free, start)
        free = end
