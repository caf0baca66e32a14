"""Write drawn pictures: a grid, a PNG each, or a .npz for ADM's evaluator.

Clips are written as MP4, beside a contact sheet of some frames of each.
"""

from __future__ import annotations

import json
import math
import re
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import IO

import numpy as np
import torch
from jaxtyping import Int64, Real, UInt8
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from titan_dit.pictures.library import video
from titan_dit.system.files import new_path, replacing, write_whole

INK = "#222222"
WIDEST = 200
"""Maximum pixels of a line of text on the grid."""
LINE = 20
"""Pixels from a line of text to the next."""
MAX_NAME_BYTES = 120
"""Maximum bytes of a caption in the name of a file."""


def to_pixels(
    samples: Real[Tensor, "n c h w"], value_range: tuple[float, float] | None
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


def to_clips(
    samples: Real[Tensor, "n c f h w"], value_range: tuple[float, float] | None
) -> UInt8[Tensor, "n f 3 h w"]:
    """Clips as frames in RGB, as `to_pixels`."""
    frames = to_pixels(samples.transpose(1, 2).flatten(0, 1), value_range)
    return torch.unflatten(frames, 0, (len(samples), -1)).permute(0, 1, 4, 2, 3)


def draw_grid(
    path: Path,
    samples: Real[Tensor, "n c h w"],
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
"""Name of the empty prompt on a grid and in the names of files."""


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


def line_of(
    number: int, suffix: str, label: int, names: Sequence[str], captioned: bool
) -> dict[str, str | int]:
    """The line of metadata.jsonl of a drawn sample; `file_name` names its file."""
    if captioned:
        name = f"{number:06d}-{safe_name(names[label])}{suffix}"
        return {"file_name": name, "text": names[label]}
    line: dict[str, str | int] = {"file_name": f"{number:06d}{suffix}", "label": label}
    if 0 <= label < len(names):
        line["class"] = names[label]
    return line


def write_metadata(folder: Path, lines: Iterable[dict[str, str | int]]) -> None:
    """Write metadata.jsonl, which `data encode` reads."""
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    write_whole(folder / METADATA, text)


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
    lines: list[dict[str, str | int]] = []
    with new_path(path) as aside:
        aside.mkdir()
        for batch in batches:
            for pixels in batch.numpy():
                line = line_of(len(lines), ".png", labels[len(lines)], names, captioned)
                Image.fromarray(pixels).save(aside / str(line["file_name"]))
                lines.append(line)
        write_metadata(aside, lines)


CONTACT_SHEET = "contact_sheet.png"
SHEET_FRAMES, FRAME_SIDE = 9, 128
"""Maximum frames of a clip on a contact sheet, and the longer side of each in pixels."""
SMALL_SIDE = 128
"""A clip whose shorter side is below it is enlarged up to it: players show no less, and MP4 halves
the resolution of colours."""
CODECS = ("libx264", "mpeg4")
"""Encoders of MP4, the better one first. Not every build of FFmpeg has both."""
QUALITY = {"libx264": {"crf": "17", "x264-params": "mbtree=0"}, "mpeg4": {"qscale": "2"}}
"""Options. With its tree of macroblocks x264 gives other bytes now and then, by its threads."""


BT709, LIMITED = 1, 1
"""FFmpeg's numbers of BT.709, and of levels from 16 to 235."""


def write_clips(
    path: Path,
    batches: Iterable[UInt8[Tensor, "b f 3 h w"]],
    labels: Sequence[int],
    names: Sequence[str],
    *,
    fps: float,
    captioned: bool = False,
    frames: bool = False,
) -> None:
    """Write 000000.mp4, 000001.mp4 ..., contact_sheet.png and `metadata.jsonl`, as `write_folder`.

    MP4 loses a little; `frames` writes each clip's as PNGs, too: 000000/0000.png ... `fps`: frames
    per second. The folder appears when it is whole. `data encode` reads it. Raises UserError
    without PyAV.
    """
    lines: list[dict[str, str | int]] = []
    strips: list[Image.Image] = []
    with new_path(path) as aside:
        aside.mkdir()
        for batch in batches:
            for clip in batch:
                line = line_of(len(lines), ".mp4", labels[len(lines)], names, captioned)
                file = aside / str(line["file_name"])
                save_clip(file, clip, fps)
                if frames:
                    write_frames(file.with_suffix(""), clip)
                strips.append(strip_of(clip))
                lines.append(line)
        numbers = labels[: len(strips)]
        draw_strips(aside / CONTACT_SHEET, strips, numbers, names)
        write_metadata(aside, lines)


def write_clip(path: Path, clip: UInt8[Tensor, "f 3 h w"], fps: float) -> None:
    """`save_clip`, but the file is whole or not there at all."""
    with replacing(path) as aside:
        save_clip(aside, clip, fps)


def save_clip(path: Path, clip: UInt8[Tensor, "f 3 h w"], fps: float) -> None:
    """Write a clip as MP4 with H.264, else MPEG-4 Part 2.

    Colours are BT.709, and tagged so. Equal clips give equal bytes. A small one is enlarged by a
    power of two, of which `data encode` gets its pixels back. One of odd height or width gets its
    last row or column twice, since MP4's colours come in squares of four pixels.
    """
    av = video("a clip as MP4")
    codec = next(name for name in CODECS if name in av.codecs_available)
    zoom = 1 << max(1, SMALL_SIDE // min(clip.shape[2:])).bit_length() - 1
    large = clip.repeat_interleave(zoom, 2).repeat_interleave(zoom, 3)
    height, width = large.shape[2:]
    pixels = large.permute(0, 2, 3, 1).cpu().numpy()
    pixels = np.pad(pixels, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), "edge")
    with av.open(f"file:{path}", "w", format="mp4") as container:
        stream = container.add_stream(codec, rate=Fraction(fps).limit_denominator(1001))
        stream.height, stream.width = pixels.shape[1:3]
        stream.pix_fmt, stream.options = "yuv420p", QUALITY[codec]
        # Untagged, players guess BT.601 or BT.709, and some guess by the height.
        context = stream.codec_context
        context.colorspace = context.color_primaries = context.color_trc = BT709
        context.color_range = LIMITED
        # Several threads would cut frames in as many slices, and give other bytes.
        context.thread_count = 1
        for pixels_of_frame in pixels:
            frame = av.VideoFrame.from_ndarray(pixels_of_frame, format="rgb24")
            container.mux(stream.encode(frame.reformat(format="yuv420p", dst_colorspace=BT709)))
        container.mux(stream.encode(None))


def write_frames(folder: Path, clip: UInt8[Tensor, "f 3 h w"]) -> None:
    """Write the frames of a clip, 0000.png, 0001.png ..., in a new folder."""
    folder.mkdir()
    for number, frame in enumerate(clip.permute(0, 2, 3, 1).cpu().numpy()):
        Image.fromarray(frame).save(folder / f"{number:04d}.png")


def draw_contact_sheet(
    path: Path, clips: UInt8[Tensor, "b f 3 h w"], labels: Sequence[int], names: Sequence[str] = ()
) -> None:
    """Draw a row of frames, evenly spaced from the first to the last, for each clip.

    `names`: of classes, or captions, as in `draw_grid`.
    """
    draw_strips(path, [strip_of(clip) for clip in clips], labels, names)


def strip_of(clip: UInt8[Tensor, "f 3 h w"]) -> Image.Image:
    """Up to SHEET_FRAMES frames of a clip side by side, a pixel of white around each."""
    shown = np.linspace(0, len(clip) - 1, min(len(clip), SHEET_FRAMES)).round().astype(int)
    height, width = clip.shape[2:]
    ratio = FRAME_SIDE / max(height, width)
    across, down = (max(1, round(side * ratio)) for side in (width, height))
    strip = Image.new("RGB", (len(shown) * (across + 2), down + 2), "white")
    how = Image.Resampling.NEAREST if ratio > 1 else Image.Resampling.BICUBIC
    for place, number in enumerate(shown):
        frame = Image.fromarray(clip[number].permute(1, 2, 0).cpu().numpy())
        strip.paste(frame.resize((across, down), how), (place * (across + 2) + 1, 1))
    return strip


def draw_strips(
    path: Path, strips: Sequence[Image.Image], labels: Sequence[int], names: Sequence[str]
) -> None:
    """Draw strips of frames under each other, each with its name on the left."""
    font = ImageFont.load_default(16)
    most = max(1, max(strip.height for strip in strips) // LINE)
    texts = [caption(label, names, font, most) for label in labels]
    lines = [line for text in texts for line in text.split("\n")]
    margin = max(44, *(16 + math.ceil(font.getlength(line)) for line in lines))
    height = sum(strip.height for strip in strips)
    sheet = Image.new("RGB", (margin + max(strip.width for strip in strips), height), "white")
    draw, top = ImageDraw.Draw(sheet), 0
    for strip, text in zip(strips, texts, strict=True):
        draw.text((8, top + strip.height // 2), text, fill=INK, font=font, anchor="lm")
        sheet.paste(strip, (margin, top))
        top += strip.height
    with replacing(path) as aside:
        sheet.save(aside, Image.registered_extensions().get(path.suffix.lower(), "PNG"))


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
