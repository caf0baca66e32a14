"""The loss curve as a PNG, drawn with Pillow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from PIL import Image, ImageDraw, ImageFont

INK, GRID, RAW, SMOOTH, OTHER = "#222222", "#dddddd", "#b9cbe4", "#1f5aa6", "#c0392b"


def smooth(values: Sequence[float], decay: float) -> list[float]:
    """Exponential moving average with bias correction."""
    mean, weight, out = 0.0, 0.0, []
    for value in values:
        mean, weight = decay * mean + (1 - decay) * value, decay * weight + 1 - decay
        out.append(mean / weight)
    return out


Curve: TypeAlias = tuple[Sequence[int], Sequence[float]]
"""Steps and values."""


def draw_curve(
    path: Path,
    steps: Sequence[int],
    losses: Sequence[float],
    title: str,
    validation: Curve = ((), ()),
) -> None:
    """Write the loss curve: logged values in light blue, their moving average in dark blue.

    `validation` is drawn in red, with a dot per value. Fewer than two finite losses write nothing.
    """
    points = [(s, v) for s, v in zip(steps, losses, strict=True) if math.isfinite(v)]
    if len(points) < 2:
        return
    xs, ys = [s for s, _ in points], [v for _, v in points]
    # The first losses are far larger: the y axis ends at the 98th percentile.
    top = sorted(ys)[int(0.98 * (len(ys) - 1))] * 1.1
    bottom = min(0.95 * min(ys), 0.9 * top)
    if not bottom < top:  # All losses equal and <= 0.
        bottom, top = min(ys) - 1, max(ys) + 1
    width, height, left, right, above, below = 960, 540, 80, 24, 48, 56
    sheet = Image.new("RGB", (width, height), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(14)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - xs[0]) / max(1, xs[-1] - xs[0])
        up = (min(y, top) - bottom) / (top - bottom)
        return left + across * (width - left - right), height - below - up * (
            height - above - below
        )

    for tick in ticks(bottom, top):
        y = place(xs[0], tick)[1]
        draw.line((left, y, width - right, y), fill=GRID)
        draw.text((left - 8, y), f"{tick:g}", fill=INK, font=font, anchor="rm")
    for tick in ticks(xs[0], xs[-1]):
        x = place(tick, bottom)[0]
        draw.text((x, height - below + 8), f"{tick:,.0f}", fill=INK, font=font, anchor="mt")
    mean = smooth(ys, 1 - 1 / max(1, len(ys) / 40))
    for line, colour, thick in ((ys, RAW, 1), (mean, SMOOTH, 3)):
        draw.line([place(x, y) for x, y in zip(xs, line, strict=True)], fill=colour, width=thick)
    dots = [place(s, v) for s, v in zip(*validation, strict=True) if math.isfinite(v)]
    draw.line(dots, fill=OTHER, width=2)
    for x, y in dots:
        draw.ellipse((x - 3, y - 3, x + 3, y + 3), fill=OTHER)
    draw.line((left, above, left, height - below), fill=INK)
    draw.line((left, height - below, width - right, height - below), fill=INK)
    draw.text((left, 16), title, fill=INK, font=ImageFont.load_default(16))
    draw.text(((left + width - right) / 2, height - 20), "step", fill=INK, font=font, anchor="mm")
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path)


def ticks(low: float, high: float) -> list[float]:
    """About five to ten round tick values from low to high."""
    span = max(high - low, 1e-12)
    size = 10 ** math.floor(math.log10(span))
    unit = next(size * part for part in (0.1, 0.2, 0.5, 1, 2) if span / (size * part) <= 10)
    return [i * unit for i in range(math.ceil(low / unit), math.floor(high / unit) + 1)]
