"""pictures.jsonl: what became of every file of the input of `data encode`.

A line for each picture or video in the order of the listing, then one for each other file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_dit.config import schema, user_text
from titan_dit.config.schema import Maybe
from titan_dit.config.section import Finite, NonNegativeInt, PositiveInt, UserError
from titan_dit.data.caption_embeddings import CAPTIONS
from titan_dit.data.manifest import read_json
from titan_dit.data.packing.output import DROPPED, PICTURES, ChunkRecord, reasons_of
from titan_dit.pictures.picture_sizes import Size, fit
from titan_dit.pictures.survey import Survey

if TYPE_CHECKING:
    from titan_dit.pictures.clip_job import ClipJob
    from titan_dit.pictures.encode_job import EncodeJob

ROUNDING = 4
"""Decimals of the shares and scales in the file."""


@dataclass(frozen=True, kw_only=True)
class FileReport:
    """A line of pictures.jsonl: a file, encoded or left out."""

    name: str
    reason: str = ""
    """Why it was left out; empty if it was encoded."""
    row: int | None = None
    """Its first row."""
    text: str | list[str] = ""
    """Its caption."""
    size: str = ""
    """Width x height of the file, upright; empty if not known."""
    bucket: str = ""
    """Width x height that it was cropped to."""
    crop: float = 0.0
    """Share of its area that was cropped."""
    scale: float = 1.0
    """Its sides after the resize, relative to the file's; above 1 it was enlarged."""
    frames: tuple[int, ...] = ()
    """Frames of each of its clips."""
    starts: tuple[float, ...] = ()
    """When each clip begins, in seconds."""
    rows: tuple[int, ...] = ()
    """The first row of each clip."""
    decoded: int = 0
    """Frames of a video that decode."""
    used: int = 0
    """Frames within clips, including those that the clips' rate skips."""
    notes: tuple[str, ...] = ()
    """Remarks for the user: cut off, turned upright, of a variable rate."""

    def __str__(self) -> str:
        """A line of `data report`."""
        if self.reason:
            return f"{self.name}: left out, {self.reason}"
        parts = [f"{self.name}:"]
        if self.decoded:
            count = f"{len(self.frames)} clips" if len(self.frames) > 1 else "1 clip"
            each = (
                "+".join(map(str, self.frames)) if len(self.frames) < 9 else f"{self.frames[0]}..."
            )
            parts.append(f"{count} of {each} frames, {self.used:,} of {self.decoded:,} used,")
        if self.bucket:
            parts.append(f"{self.size} to {self.bucket}, crop {self.crop:.1%},")
            parts.append(f"enlarged {self.scale:.2f}x," if self.scale > 1 else "not enlarged,")
        parts += [f"{note}," for note in self.notes]
        parts.append(json.dumps(self.text, ensure_ascii=False) if self.text else "no caption")
        return " ".join(parts)


SCHEMA = {
    "file_name": str,
    "reason": Maybe(str),
    "row": Maybe(schema.COUNT),
    "text": Maybe(schema.Either(str, tuple[str, ...])),
    "size": Maybe(str),
    "bucket": Maybe(str),
    "crop": Maybe(Finite),
    "scale": Maybe(Finite),
    "frames": Maybe(tuple[PositiveInt, ...]),
    "starts": Maybe(tuple[Finite, ...]),
    "rows": Maybe(tuple[NonNegativeInt, ...]),
    "decoded": Maybe(PositiveInt),
    "used": Maybe(PositiveInt),
    "notes": Maybe(tuple[str, ...]),
}
"""Schema of a line."""


def picture_lines(
    job: EncodeJob, survey: Survey, records: Sequence[ChunkRecord]
) -> Iterator[bytes]:
    """The lines of pictures.jsonl."""
    dropped = {row: reason for record in records for row, reason in record.dropped}
    rows = first_rows(job, records)
    for picture, name in enumerate(job.names):
        line: dict[str, Any] = {"file_name": name}
        if picture in dropped:
            line["reason"] = dropped[picture]
        elif (size := survey.size(picture)).pixels:
            line |= {"row": rows[picture], **crop_of(job.sizes, size)}
        if job.pictures.texts:
            line["text"] = job.pictures.texts[picture]
        yield as_line(line)
    for name, reason in job.pictures.beside:
        yield as_line({"file_name": name, "reason": reason})


def crop_of(sizes: tuple[Size, ...], size: Size) -> dict[str, Any]:
    """The keys of a line about size and crop."""
    found = fit(sizes, size)
    return {
        "size": str(size),
        "bucket": str(sizes[found.bucket]),
        "crop": max(0.0, round(1 - found.kept, ROUNDING)),
        "scale": round(found.scale, ROUNDING),
    }


def clip_lines(job: ClipJob, records: Sequence[ChunkRecord]) -> Iterator[bytes]:
    """The lines of pictures.jsonl of a job of clips: one for each file, whatever became of it."""
    dropped = {row: reason for record in records for row, reason in record.dropped}
    firsts = first_rows(job, records)
    sizes = tuple(dict.fromkeys(job.sizes))
    rows_of_file: dict[int, list[int]] = {}
    for row, file in enumerate(job.files):
        rows_of_file.setdefault(file, []).append(row)
    for file, rows in rows_of_file.items():
        line: dict[str, Any] = {"file_name": job.listed.names[file]}
        kept = [row for row in rows if row not in dropped]
        if kept:
            line |= {"row": firsts[kept[0]], **crop_of(sizes, job.looked.size(file))}
        else:
            line["reason"] = dropped[rows[0]]
        if (found := job.looked.clips.get(file)) is not None and kept:
            at = [row - rows[0] for row in kept]
            line["frames"] = [found.clips[number].frames for number in at]
            line["starts"] = [round(found.starts[number], ROUNDING) for number in at]
            line["rows"] = [firsts[row] for row in kept]
            line |= {"decoded": found.num_frames, "used": found.used}
            lost = sorted({dropped[row] for row in rows if row in dropped})
            line["notes"] = [*found.notes, *(f"clips left out: {reason}" for reason in lost)]
        if job.listed.texts:
            line["text"] = job.listed.texts[file]
        yield as_line(line)
    for name, reason in job.listed.beside:
        yield as_line({"file_name": name, "reason": reason})


def as_line(values: dict[str, Any]) -> bytes:
    """A line of JSON. Names may be of any bytes."""
    return (json.dumps(values, ensure_ascii=False) + "\n").encode("utf-8", "replace")


def first_rows(job: EncodeJob, records: Sequence[ChunkRecord]) -> dict[int, int]:
    """Picture -> its first row in the shards; pictures without one are left out."""
    found, row = {}, 0
    for chunk, record in enumerate(records):
        lost = {picture for picture, _ in record.dropped}
        for picture in job.rows(chunk):
            if picture not in lost:
                found[picture] = row
                row += job.copies
    return found


def read_report(folder: Path) -> Iterator[FileReport]:
    """The report of an encoded set; of one without pictures.jsonl, from captions and dropped.json.

    Raises UserError for a folder without any of them, and for a damaged file.
    """
    file = folder / PICTURES
    if file.is_file():
        yield from read_lines(file)
        return
    if not (folder / CAPTIONS).is_file() and not (folder / DROPPED).is_file():
        known = "its files are not known" if read_json(folder) else "no set of `data encode`"
        raise UserError(
            f"[data report] path={folder}: {known}. Encode with --buckets or --pixels, which write "
            f"{PICTURES}."
        )
    if (folder / CAPTIONS).is_file():
        yield from read_lines(folder / CAPTIONS)
    count = int(read_json(folder).get("dropped") or 0)
    for name, reason in reasons_of(folder / DROPPED, count).items():
        yield FileReport(name=name, reason=reason)


def read_lines(file: Path) -> Iterator[FileReport]:
    """The lines of pictures.jsonl or captions.jsonl. Raises UserError."""
    where = f"[data report] {file}"
    for number, text in user_text.lines(file, where, user_text.MAX_LINE_BYTES, "Encode again."):
        try:
            values = user_text.parse_json(text, unique=True)
        except user_text.BadTextError as error:
            raise UserError(f"{where}, line {number}: {error}. Encode again.") from None
        schema.check(values, SCHEMA, f"{where}, line {number}:")
        known = {key: values[key] for key in SCHEMA if key in values and key != "file_name"}
        yield FileReport(name=values["file_name"], **known)


@dataclass
class BucketReport:
    """The pictures, or the clips, of a bucket."""

    what: str = "pictures"
    count: int = 0
    crops: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)

    def add(self, report: FileReport) -> None:
        """Count a picture."""
        self.count += 1
        self.crops.append(report.crop)
        self.scales.append(report.scale)

    def __str__(self) -> str:
        """Counts, crops and enlargements, for the console."""
        larger = [scale for scale in self.scales if scale > 1]
        enlarged = f"{len(larger):,} enlarged" + (f" up to {max(larger):.2f}x" if larger else "")
        mean, most = sum(self.crops) / len(self.crops), max(self.crops)
        return f"{self.count:,} {self.what}, crop {mean:.1%} up to {most:.1%}, {enlarged}"


def by_bucket(reports: Sequence[FileReport]) -> dict[str, BucketReport]:
    """The report of each bucket that has pictures, by its size; narrow ones first.

    Those of clips, "17 x 832x480", come after them, short ones first.
    """
    found: dict[tuple[int, str], BucketReport] = {}
    for report in reports:
        if report.bucket and not report.reason:
            for frames in report.frames or (0,):
                what = "clips" if frames else "pictures"
                found.setdefault((frames, report.bucket), BucketReport(what)).add(report)
    return {
        f"{frames} x {bucket}" if frames else bucket: found[frames, bucket]
        for frames, bucket in sorted(found, key=lambda key: (key[0], ratio_of(key[1])))
    }


def ratio_of(bucket: str) -> tuple[float, str]:
    """Sort key of a size: width / height."""
    width, _, height = bucket.partition("x")
    if not (width.isdecimal() and height.isdecimal()) or not int(height):
        return 0.0, bucket
    return Size(int(width), int(height)).width / int(height), bucket
