"""Write drawn pictures: a grid, a PNG each, or a .npz for ADM's evaluator."""

from __future__ import annotations

import json
import math
import re
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from titan_dit.system.files import new_path, replacing, write_whole

INK = "#222222"
WIDEST = 200
"""Maximum pixels of a line of text on the grid."""
LINE = 20
"""Pixels from a line of text to the next."""
MAX_NAME_BYTES = 120
"""Maximum bytes of a caption in the name of a file."""


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
    """Draw a grid of enlarged samples: rows by label, each with its name on the left.

    `names`: of classes, or captions. Without them the label's number is written; a negative label
    is "none".
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
    most = max(1, cell_h // LINE)
    texts = {label: caption(label, names, font, most) for label, _ in rows}
    lines = [line for text in texts.values() for line in text.split("\n")]
    margin = max(44, *(16 + math.ceil(font.getlength(line)) for line in lines))
    sheet = Image.new("RGB", (margin + columns * cell_w, len(rows) * cell_h), "white")
    draw = ImageDraw.Draw(sheet)
    for y, (label, members) in enumerate(rows):
        draw.text((8, y * cell_h + cell_h // 2), texts[label], fill=INK, font=font, anchor="lm")
        for x, index in enumerate(members):
            image = Image.fromarray(pixels[index].cpu().numpy())
            image = image.resize((cell_w - 2, cell_h - 2), Image.Resampling.BICUBIC)
            sheet.paste(image, (margin + x * cell_w + 1, y * cell_h + 1))
    with replacing(path) as aside:
        sheet.save(aside, Image.registered_extensions().get(path.suffix.lower(), "PNG"))


def caption(
    label: int,
    names: Sequence[str],
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
    most: int = 1,
) -> str:
    """The text of a grid's row: at most `most` lines, each at most `WIDEST` pixels wide."""
    text = "none" if label < 0 else names[label] if label < len(names) else str(label)
    lines = [""]
    # A character is wider than a pixel.
    for word in (text[: (most + 1) * WIDEST] or EMPTY).split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and font.getlength(longer) > WIDEST:
            lines.append(word)
        else:
            lines[-1] = longer
    kept = lines[:most]
    if len(lines) > most:
        kept[-1] += "..."
    return "\n".join(shortened(line, font) for line in kept)


def shortened(line: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> str:
    """A line cut to `WIDEST` pixels."""
    if len(line) <= WIDEST and font.getlength(line) <= WIDEST:
        return line
    line = line.removesuffix("...")[:WIDEST]
    while font.getlength(line + "...") > WIDEST:
        line = line[:-1]
    return line + "..."


EMPTY = "empty prompt"
"""What stands for it on a grid and in the names of files."""


SIZE, COLUMNS = 64, 40
SHEET_CAPTIONS = "captions.jsonl"
"""File beside the sheets, a line of JSON per picture: {"file_name": "flags/x.png", "label":
"flags", "text": ...}."""


def box(place: int) -> tuple[int, int, int, int]:
    """Left, upper, right and lower edge of picture number `place` on its sheet, in pixels."""
    row, column = divmod(place, COLUMNS)
    return (column * SIZE, row * SIZE, (column + 1) * SIZE, (row + 1) * SIZE)


def read_sheet(folder: Path) -> Iterator[tuple[dict[str, str], Image.Image]]:
    """Each picture's line of captions.jsonl, and the picture in RGB."""
    sheets: dict[str, Image.Image] = {}
    places: Counter[str] = Counter()
    for text in (folder / SHEET_CAPTIONS).read_text().splitlines():
        line = json.loads(text)
        label = line["label"]
        if label not in sheets:
            sheets[label] = Image.open(folder / f"{label}.webp").convert("RGB")
        yield line, sheets[label].crop(box(places[label]))
        places[label] += 1


METADATA = "metadata.jsonl"
DATE = (1980, 1, 1, 0, 0, 0)
"""Date of the arrays in a .npz: equal pictures give equal bytes."""


def safe_name(text: str) -> str:
    """A caption as part of a file's name: letters and digits, and "-" for all between them."""
    words = re.sub(r"[\W_]+", "-", text or EMPTY).strip("-").lower()
    return words.encode()[:MAX_NAME_BYTES].decode(errors="ignore").rstrip("-") or "prompt"


def write_folder(
    path: Path,
    batches: Iterable[UInt8[Tensor, "b h w 3"]],
    labels: Sequence[int],
    names: Sequence[str],
    *,
    captioned: bool = False,
) -> None:
    """Write 000000.png, 000001.png ... and `metadata.jsonl` with each one's label.

    `captioned`: `names` are captions, which stand in the names of the files, too, as in
    000000-a-red-seven.png. The folder appears when it is whole. `data encode` reads it.
    """
    lines, number = [], 0
    with new_path(path) as aside:
        aside.mkdir()
        for batch in batches:
            for pixels in batch.numpy():
                label = labels[number]
                file = f"{number:06d}.png"
                line: dict[str, str | int] = {"file_name": file, "label": label}
                if captioned:
                    file = f"{number:06d}-{safe_name(names[label])}.png"
                    line = {"file_name": file, "text": names[label]}
                elif 0 <= label < len(names):
                    line["class"] = names[label]
                Image.fromarray(pixels).save(aside / file)
                lines.append(json.dumps(line, ensure_ascii=False))
                number += 1
        write_whole(aside / METADATA, "\n".join(lines) + "\n")


def write_npz(
    path: Path,
    batches: Iterable[UInt8[Tensor, "b h w 3"]],
    labels: Int64[Tensor, " n"],
    shape: tuple[int, int, int, int],
) -> None:
    """Write `arr_0`, uint8 [n, h, w, 3], and `arr_1`, the labels (arXiv:2105.05233's evaluator).

    Batches are written one by one, so the pictures need not fit into memory.
    """
    with (
        replacing(path) as aside,
        zipfile.ZipFile(aside, "w", allowZip64=True) as archive,
    ):
        with archive.open(entry("arr_0"), "w", force_zip64=True) as file:
            write_header(file, shape, np.dtype(np.uint8))
            for batch in batches:
                file.write(batch.contiguous().numpy().tobytes())
        with archive.open(entry("arr_1"), "w") as file:
            write_header(file, (len(labels),), np.dtype(np.int64))
            file.write(labels.numpy().tobytes())


def entry(name: str) -> zipfile.ZipInfo:
    """The zip entry of an array, uncompressed."""
    return zipfile.ZipInfo(f"{name}.npy", DATE)


def write_header(file: IO[bytes], shape: tuple[int, ...], dtype: np.dtype) -> None:
    """Write the header of a .npy file."""
    described = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False}
    np.lib.format.write_array_header_1_0(file, {**described, "shape": shape})
