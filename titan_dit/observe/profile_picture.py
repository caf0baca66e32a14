"""The profile summary as a PNG: the step time as a stacked bar, and the table."""

from __future__ import annotations

from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from titan_dit.observe.curve import GRID, INK
from titan_dit.observe.profile_summary import Summary, TimeKind, shortened

COLOURS = {
    TimeKind.GEMM: "#1f5aa6",
    TimeKind.ATTENTION: "#4f9ad1",
    TimeKind.ELEMENTWISE: "#8cc6a0",
    TimeKind.OPTIMIZER: "#d9b44a",
    TimeKind.COMMUNICATION: "#c8553d",
    TimeKind.DATA_WAIT: "#8e5ea2",
    TimeKind.IDLE: "#cccccc",
}
WIDTH, LEFT, ROW = 960, 32, 26
BAR_TOP, BAR_HEIGHT = 56, 64


def cuts(summary: Summary, width: int) -> list[tuple[TimeKind, int, int]]:
    """(kind, first pixel, pixel after the last) of each part of the stacked bar, without gaps."""
    edges, so_far = [], 0.0
    for kind in TimeKind:
        first, so_far = round(so_far / summary.wall_ms * width), so_far + summary.ms[kind]
        edges.append((kind, first, round(so_far / summary.wall_ms * width)))
    return edges


def draw(path: Path, summary: Summary, title: str, steps: int) -> None:
    """Write the PNG."""
    rows = list(summary.rows(steps))
    height = BAR_TOP + BAR_HEIGHT + 32 + ROW * (len(rows) + len(summary.top) + 4)
    sheet = Image.new("RGB", (WIDTH, height), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(15)
    heading = f"{title}: {summary.wall_ms / steps:.2f} ms per step, {summary.device}"
    pen.text((LEFT, 18), heading, fill=INK, font=ImageFont.load_default(18))
    for kind, first, last in cuts(summary, WIDTH - 2 * LEFT):
        if last > first:
            box = (LEFT + first, BAR_TOP, LEFT + last - 1, BAR_TOP + BAR_HEIGHT)
            pen.rectangle(box, fill=COLOURS[kind])
    y = BAR_TOP + BAR_HEIGHT + 28
    pen.text((470, y), "ms per step", fill=INK, font=font, anchor="rm")
    pen.text((570, y), "share", fill=INK, font=font, anchor="rm")
    for what, ms, share in rows:
        y += ROW
        if what in COLOURS:
            pen.rectangle((LEFT, y - 8, LEFT + 16, y + 8), fill=COLOURS[TimeKind(what)])
        pen.text((LEFT + 28, y), what, fill=INK, font=font, anchor="lm")
        pen.text((470, y), f"{ms:.3f}", fill=INK, font=font, anchor="rm")
        pen.text((570, y), f"{share:.1%}", fill=INK, font=font, anchor="rm")
    y += ROW
    pen.line((LEFT, y, WIDTH - LEFT, y), fill=GRID)
    y += ROW
    pen.text((LEFT, y), "longest kernels or operators", fill=INK, font=font, anchor="lm")
    for x, text in ((680, "calls"), (800, "ms per step")):
        pen.text((x, y), text, fill=INK, font=font, anchor="rm")
    for top in summary.top:
        y += ROW
        pen.rectangle((LEFT, y - 8, LEFT + 16, y + 8), fill=COLOURS[top.kind])
        name = shortened(top.name, 60)
        pen.text((LEFT + 28, y), name, fill=INK, font=font, anchor="lm")
        pen.text((680, y), f"{top.calls / steps:.0f}", fill=INK, font=font, anchor="rm")
        pen.text((800, y), f"{top.ms / steps:.3f}", fill=INK, font=font, anchor="rm")
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path)
