"""Pictures kept in sheets: one lossless image of many 64x64 pictures for each class."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from PIL import Image

SIZE, COLUMNS = 64, 40
CAPTIONS = "captions.jsonl"
"""Beside the sheets: a line {"file_name": "flags/x.png", "label": "flags", "text": ...} each."""


def box(place: int) -> tuple[int, int, int, int]:
    """Left, upper, right and lower edge of picture number `place` on its sheet, in pixels."""
    row, column = divmod(place, COLUMNS)
    return (column * SIZE, row * SIZE, (column + 1) * SIZE, (row + 1) * SIZE)


def read(folder: Path) -> Iterator[tuple[dict[str, str], Image.Image]]:
    """Each picture's line of CAPTIONS and the picture, RGB."""
    sheets: dict[str, Image.Image] = {}
    places: Counter[str] = Counter()
    for text in (folder / CAPTIONS).read_text().splitlines():
        line = json.loads(text)
        label = line["label"]
        if label not in sheets:
            sheets[label] = Image.open(folder / f"{label}.webp").convert("RGB")
        yield line, sheets[label].crop(box(places[label]))
        places[label] += 1
