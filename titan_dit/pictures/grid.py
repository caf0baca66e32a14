"""Samples as a PNG, drawn with Pillow."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Float, UInt8
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from titan_dit.system.files import replacing

INK = "#222222"
WIDEST = 200
"""Pixels of a class name on the grid; the rest of it is cut off."""


def to_pixels(
    samples: Float[Tensor, "n c h w"], value_range: tuple[float, float] | None
) -> UInt8[Tensor, "n h w 3"]:
    """Samples as RGB: grey below three channels, else the first three.

    Without a `value_range` (latents) each channel is stretched to its own minimum and maximum.
    """
    shown = samples[:, : 3 if samples.shape[1] >= 3 else 1].float()
    if value_range is None:
        low, high = shown.amin((0, 2, 3), keepdim=True), shown.amax((0, 2, 3), keepdim=True)
    else:
        low, high = torch.tensor(value_range[0]), torch.tensor(value_range[1])
    unit = ((shown - low) / (high - low).clamp(min=1e-12)).clamp(0, 1)
    return (unit * 255).round().byte().expand(-1, 3, -1, -1).permute(0, 2, 3, 1)


def draw_grid(
    path: Path,
    samples: Float[Tensor, "n c h w"],
    labels: Sequence[int],
    value_range: tuple[float, float] | None,
    names: Sequence[str] = (),
    max_columns: int = 20,
) -> None:
    """Draw a grid of enlarged samples: one or more rows per label, with its name on the left.

    Without `names` the label's number; "none" for a negative label.
    """
    pixels = to_pixels(samples, value_range)
    zoom = max(1, 48 // pixels.shape[1])
    cell_h, cell_w = pixels.shape[1] * zoom + 2, pixels.shape[2] * zoom + 2
    rows: list[tuple[int, list[int]]] = []
    for label in sorted(set(labels)):
        members = [i for i, of in enumerate(labels) if of == label]
        for first in range(0, len(members), max_columns):
            rows.append((label, members[first : first + max_columns]))
    columns = max(len(members) for _, members in rows)
    font = ImageFont.load_default(16)
    texts = {label: caption(label, names, font) for label, _ in rows}
    margin = max(44, *(16 + math.ceil(font.getlength(text)) for text in texts.values()))
    sheet = Image.new("RGB", (margin + columns * cell_w, len(rows) * cell_h), "white")
    draw = ImageDraw.Draw(sheet)
    for y, (label, members) in enumerate(rows):
        draw.text((8, y * cell_h + cell_h // 2), texts[label], fill=INK, font=font, anchor="lm")
        for x, index in enumerate(members):
            image = Image.fromarray(pixels[index].cpu().numpy())
            image = image.resize((cell_w - 2, cell_h - 2), Image.Resampling.BICUBIC)
            sheet.paste(image, (margin + x * cell_w + 1, y * cell_h + 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, f".{os.getpid()}") as aside:
        sheet.save(aside, Image.registered_extensions().get(path.suffix.lower(), "PNG"))


def caption(
    label: int, names: Sequence[str], font: ImageFont.FreeTypeFont | ImageFont.ImageFont
) -> str:
    """The text of a row, at most `WIDEST` wide."""
    text = "none" if label < 0 else names[label] if label < len(names) else str(label)
    text = " ".join(text.split())  # Pillow measures one line.
    if font.getlength(text) <= WIDEST:
        return text
    while font.getlength(text + "...") > WIDEST:
        text = text[:-1]
    return text + "..."
