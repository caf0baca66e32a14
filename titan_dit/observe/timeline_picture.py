"""One pass of a pipeline as a PNG: a row per rank, computing coloured, idle time left pale."""

from __future__ import annotations

from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from titan_dit.observe.curve import GRID, INK, OTHER, ticks
from titan_dit.observe.suspects import Suspects
from titan_dit.observe.timeline import RankTimeline, Timeline
from titan_dit.schedules.action import Action

COMPUTED = {
    "F": ("forward", "#1f5aa6", "#4f8fd6"),
    "B": ("backward", "#1e8449", "#45b375"),
    "I": ("input gradient", "#148f8a", "#3fc0ba"),
    "W": ("weight gradient", "#d9a441", "#ecc887"),
}
"""Kind -> (label, colours on the stages of a rank in turn)."""
IDLE = {
    "input": ("idle: input", "#f6c9c2"),
    "gradient": ("idle: gradient", "#f3dcc8"),
    "memory": ("idle: memory", "#e3cdea"),
    "decision": ("idle: decision", "#f2a7a0"),
    "rest": ("idle: rest", "#ececec"),
    "over": ("its pass is over", "#d3d8de"),
}
WIDTH, LEFT, RIGHT = 1600, 110, 110
TOP, ROW, GAP = 96, 46, 10


class Picture:
    """The sheet, and where a moment is on it."""

    def __init__(self, timeline: Timeline, number: int, width_s: float | None = None) -> None:
        """`width_s`: seconds of the whole width; None: those of the pass."""
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
        shown += [legend for cause, legend in IDLE.items() if cause in causes]
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
        self.pen.rectangle((LEFT, top, edge, top + ROW), fill=IDLE["over"][1])
        for kind, start, end in rank.spans:
            if kind in IDLE and start < self.start + self.length and end > self.start:
                box = self.x(start), top, self.x(end), top + ROW
                self.pen.rectangle(box, fill=IDLE[kind][1])
        turns = [s for s, place in enumerate(self.timeline.stage_ranks) if place == rank.rank]
        for action, start, end, _ in rank.passes[self.number].actions:
            self.action(action, turns.index(action.stage) % 2, (self.x(start), self.x(end)), top)
        words = "slow" if accused else f"{self.busy(rank):.0%} busy"
        at = WIDTH - RIGHT + 12, top + ROW // 2
        self.pen.text(at, words, fill=OTHER if accused else INK, font=self.font, anchor="lm")

    def action(self, action: Action, turn: int, cut: tuple[int, int], top: int) -> None:
        """One action, with its microbatch if there is room."""
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


def draw(path: Path, timeline: Timeline, suspects: Suspects) -> None:
    """Write the picture of the pass of median length."""
    picture = Picture(timeline, timeline.typical)
    picture.title()
    for rank in timeline.ranks:
        picture.row(rank, rank.rank in suspects.ranks)
    picture.axis()
    lines = suspects.lines()
    text = "; ".join(lines[:2]) + (f"; {len(lines) - 2} more" if len(lines) > 2 else "")
    at = LEFT, picture.bottom + 48
    picture.pen.text(at, text, fill=OTHER if suspects else INK, font=picture.font)
    path.parent.mkdir(parents=True, exist_ok=True)
    # A palette: a third of the bytes.
    picture.sheet.quantize(128).save(path, optimize=True)
