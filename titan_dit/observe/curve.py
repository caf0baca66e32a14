"""Loss curves as a PNG, drawn with Pillow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from PIL import Image, ImageDraw, ImageFont

from titan_dit.system.files import replacing

INK, GRID, RAW, SMOOTH, OTHER = "#222222", "#dddddd", "#b9cbe4", "#1f5aa6", "#c0392b"
COLOURS = (
    *("#1f5aa6", "#d35400", "#1e8449", "#c0392b", "#7d3c98"),
    *("#7e5109", "#c2185b", "#566573", "#9a9a00", "#00838f"),
)
"""Colours of the runs, in their order; they repeat."""
WIDTH, HEIGHT, LEFT, RIGHT, ABOVE, BELOW = 960, 540, 80, 24, 48, 56
"""Pixels of a picture, and of its margins."""


def smooth(values: Sequence[float], decay: float) -> list[float]:
    """Exponential moving average with bias correction."""
    mean, weight, out = 0.0, 0.0, []
    for value in values:
        mean, weight = decay * mean + (1 - decay) * value, decay * weight + 1 - decay
        out.append(mean / weight)
    return out


Curve: TypeAlias = tuple[Sequence[int], Sequence[float]]
"""Steps and values."""
NOTHING: Curve = ((), ())


class Sheet:
    """Axes of losses over steps; losses far above the others are cut off."""

    def __init__(self, steps: Sequence[int], losses: Sequence[float], title: str) -> None:
        self.first, self.last = min(steps), max(steps)
        # The first losses are far larger: the y axis ends at the 98th percentile.
        self.top = sorted(losses)[int(0.98 * (len(losses) - 1))] * 1.1
        self.bottom = min(0.95 * min(losses), 0.9 * self.top)
        if not self.bottom < self.top:  # All losses equal and <= 0.
            self.bottom, self.top = min(losses) - 1, max(losses) + 1
        self.image = Image.new("RGB", (WIDTH, HEIGHT), "white")
        self.draw = ImageDraw.Draw(self.image)
        self.font = ImageFont.load_default(14)
        for tick in ticks(self.bottom, self.top):
            y = self.place(self.first, tick)[1]
            self.draw.line((LEFT, y, WIDTH - RIGHT, y), fill=GRID)
            self.text((LEFT - 8, y), f"{tick:g}", "rm")
        for tick in ticks(self.first, self.last):
            self.text((self.place(tick, self.bottom)[0], HEIGHT - BELOW + 8), f"{tick:,.0f}", "mt")
        self.draw.line((LEFT, ABOVE, LEFT, HEIGHT - BELOW), fill=INK)
        self.draw.line((LEFT, HEIGHT - BELOW, WIDTH - RIGHT, HEIGHT - BELOW), fill=INK)
        self.draw.text((LEFT, 16), title, fill=INK, font=ImageFont.load_default(16))
        self.text(((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 20), "step", "mm")

    def place(self, step: float, loss: float) -> tuple[float, float]:
        """The pixel of a point."""
        across = (step - self.first) / max(1, self.last - self.first)
        up = (min(loss, self.top) - self.bottom) / (self.top - self.bottom)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BELOW - up * (
            HEIGHT - ABOVE - BELOW
        )

    def text(self, at: tuple[float, float], text: str, anchor: str) -> None:
        """Write a word; `anchor` as in Pillow."""
        self.draw.text(at, text, fill=INK, font=self.font, anchor=anchor)

    def line(self, curve: Curve, colour: str, width: int, dots: bool = False) -> None:
        """Draw a curve, with a dot per value if asked."""
        points = [self.place(*point) for point in zip(*curve, strict=True)]
        self.draw.line(points, fill=colour, width=width)
        for x, y in points if dots else ():
            self.draw.ellipse((x - 3, y - 3, x + 3, y + 3), fill=colour)

    def save(self, path: Path) -> None:
        """Write the PNG."""
        save_png(self.image, path)


def save_png(image: Image.Image, path: Path) -> None:
    """Write a PNG whole or not at all. Makes its folder."""
    with replacing(path) as aside:
        image.save(aside, "PNG", optimize=image.mode == "P")


def finite(curve: Curve) -> Curve:
    """A curve without values that are not finite."""
    points = [(s, v) for s, v in zip(*curve, strict=True) if math.isfinite(v)]
    return [s for s, _ in points], [v for _, v in points]


def smooth_curve(curve: Curve) -> Curve:
    """The moving average over 1/40 of a curve's values."""
    return curve[0], smooth(curve[1], 1 - 1 / max(1, len(curve[1]) / 40))


def draw_curve(
    path: Path,
    steps: Sequence[int],
    losses: Sequence[float],
    title: str,
    validation: Curve = NOTHING,
    smoothed: Curve = NOTHING,
) -> None:
    """Write the loss curve: logged values in light blue, the moving average in dark blue.

    `smoothed`: the values to average; by default the logged ones. `validation` is drawn in red,
    with a dot per value. Nothing is written for fewer than two finite losses.
    """
    logged = finite((steps, losses))
    if len(logged[0]) < 2:
        return
    sheet = Sheet(*logged, title)
    sheet.line(logged, RAW, 1)
    sheet.line(smooth_curve(smoothed if smoothed[0] else logged), SMOOTH, 3)
    sheet.line(finite(validation), OTHER, 2, dots=True)
    sheet.save(path)


def draw_runs(path: Path, runs: Sequence[tuple[str, Curve, Curve]]) -> bool:
    """Write the curves of several runs (name, losses, validation losses), a colour each.

    Lines are moving averages; validation losses are dots. Returns False, and writes nothing, if no
    run has two losses.
    """
    shown = [(name, smooth_curve(losses), points) for name, losses, points in runs]
    drawn = [curve for _, losses, points in shown for curve in (losses, points)]
    if all(len(losses[0]) < 2 for _, losses, _ in shown):
        return False
    steps = [step for curve in drawn for step in curve[0]]
    values = [value for curve in drawn for value in curve[1]]
    sheet = Sheet(steps, values, "training loss, smoothed, and validation loss (dots)")
    for number, (name, losses, points) in enumerate(shown):
        colour = COLOURS[number % len(COLOURS)]
        sheet.line(losses, colour, 2)
        sheet.line(points, colour, 1, dots=True)
        y = ABOVE + 8 + 18 * number
        if y < HEIGHT - BELOW - 18:
            sheet.draw.rectangle((WIDTH - RIGHT - 14, y - 5, WIDTH - RIGHT - 4, y + 5), fill=colour)
            sheet.text((WIDTH - RIGHT - 20, y), name, "rm")
    sheet.save(path)
    return True


def ticks(low: float, high: float) -> list[float]:
    """About five to ten round tick values from low to high."""
    span = max(high - low, 1e-12)
    size = 10 ** math.floor(math.log10(span))
    unit = next(size * part for part in (0.1, 0.2, 0.5, 1, 2) if span / (size * part) <= 10)
    return [i * unit for i in range(math.ceil(low / unit), math.floor(high / unit) + 1)]
