"""The size of every picture and the clips of every video, which choose their buckets.

A picture's size is that of its header. A video is decoded: its header does not say what decodes.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from titan_dit.config.section import UserError
from titan_dit.data.files import NO_FILE, BadFileError
from titan_dit.data.listing import suffix_of
from titan_dit.data.packing.images import ORIENTATION, TURNED, TURNS, known_formats
from titan_dit.pictures.clips import SUFFIXES, Clip
from titan_dit.pictures.picture_set import UNLABELLED, PictureSet
from titan_dit.pictures.picture_sizes import MIN_KEPT, Fit, Size, fit

EXIF_BYTES = 1 << 16
"""Maximum bytes of EXIF behind the pixels of a PNG; longer ones are ignored."""
READ_AHEAD = 1024
"""Pictures that threads are given at once."""


class FoundClips(NamedTuple):
    """The clips of a video file."""

    clips: tuple[Clip, ...]
    starts: tuple[float, ...]
    """When each begins, in seconds from the begin of the file."""
    num_frames: int
    """Frames of the file that decode."""
    used: int
    """Frames within clips, including those that the clips' rate skips."""
    notes: tuple[str, ...]
    """Remarks on the file for the user."""


Stamp: TypeAlias = tuple[int, int]
"""Length and time of modification of a file."""


class Keeps(Protocol):
    """Keeps what was found in videos."""

    def get(self, name: str, stamp: Stamp) -> tuple[Size, FoundClips] | str | None:
        """What was found in a file, or why it is left out; None if it has changed."""

    def add(self, name: str, stamp: Stamp, look: tuple[Size, FoundClips] | str) -> None:
        """Keep what was found."""


class Looks(Protocol):
    """Finds the clips of video files."""

    def look(self, path: Path) -> tuple[Size, FoundClips]:
        """The size of a video, and its clips. Raises BadFileError if it has none."""


@dataclass(frozen=True)
class Survey:
    """Width and height of every picture of a set, and the clips of every video."""

    sizes: NDArray[np.int32]
    """[n, 2]: width and height, upright; 0 for a picture that is left out."""
    reasons: dict[int, str]
    """Row -> why the picture is left out."""
    clips: dict[int, FoundClips] = field(default_factory=dict)
    """Row -> the clips of a video."""

    def size(self, row: int) -> Size:
        """The size of a picture; (0, 0) if it is left out."""
        width, height = self.sizes[row].tolist()
        return Size(width, height)

    @classmethod
    def joined(cls, parts: Sequence[Survey]) -> Survey:
        """The survey of a set from the surveys of its parts, in their order."""
        reasons: dict[int, str] = {}
        clips: dict[int, FoundClips] = {}
        first = 0
        for part in parts:
            reasons |= {first + at: reason for at, reason in part.reasons.items()}
            clips |= {first + at: found for at, found in part.clips.items()}
            first += len(part.sizes)
        return cls(np.concatenate([part.sizes for part in parts]), reasons, clips)


def survey_share(
    pictures: PictureSet,
    threads: int,
    report: Callable[[int], None],
    rank: int = 0,
    num_ranks: int = 1,
    videos: Looks | None = None,
    kept: Keeps | None = None,
) -> Survey:
    """Read the sizes of a rank's share of the pictures, and look at its videos.

    `report` gets increments of files. `kept`: has what was found before. Raises UserError if the
    disk fails.
    """
    # Neighbours: a row group of parquet is unpacked as a whole.
    first, end = (len(pictures) * share // num_ranks for share in (rank, rank + 1))
    rows = range(first, end)
    sizes = np.zeros((len(rows), 2), np.int32)
    reasons: dict[int, str] = {}
    clips: dict[int, FoundClips] = {}

    def found(row: int) -> tuple[Size, FoundClips | None] | str:
        try:
            check_used(pictures, row)
            if videos is not None and is_video(pictures, row):
                return look(pictures, row, videos, kept)
            return size_of(pictures, row), None
        except BadFileError as error:
            return str(error)

    try:
        with ThreadPoolExecutor(threads) as pool:
            for first in range(0, len(rows), READ_AHEAD):
                some = rows[first : first + READ_AHEAD]
                for at, result in enumerate(pool.map(found, some), first):
                    if isinstance(result, str):
                        reasons[at] = result
                    else:
                        sizes[at], of_video = result
                        if of_video is not None:
                            clips[at] = of_video
                    report(1)
    except OSError as error:
        raise UserError(f"[data encode] {error}") from None
    return Survey(sizes, reasons, clips)


def look(
    pictures: PictureSet, row: int, videos: Looks, kept: Keeps | None
) -> tuple[Size, FoundClips] | str:
    """The size and clips of a video, or why it is left out; from `kept` if it is the same."""
    assert pictures.path is not None
    name, stamp = pictures.names[row], pictures.stamp(row)
    if kept is not None and (before := kept.get(name, stamp)) is not None:
        return before
    found: tuple[Size, FoundClips] | str
    try:
        found = videos.look(pictures.path(row))
    except BadFileError as error:
        found = str(error)
    if kept is not None and stamp == pictures.stamp(row) != NO_FILE:
        kept.add(name, stamp, found)
    return found


def is_video(pictures: PictureSet, row: int) -> bool:
    """True if a row of a set is a video file, by its name."""
    return pictures.path is not None and suffix_of(pictures.names[row]) in SUFFIXES


def check_used(pictures: PictureSet, row: int) -> None:
    """Raise BadFileError if a picture is left out."""
    if reason := pictures.left_out.get(row):
        raise BadFileError(reason)
    if int(pictures.labels[row]) < 0:
        raise BadFileError(UNLABELLED)


def size_of(pictures: PictureSet, row: int) -> Size:
    """The upright size of a picture. Raises BadFileError if it cannot be read."""
    path = None if pictures.path is None else pictures.path(row)
    if path is not None and path.is_file() and is_small(path.stat().st_size, pictures):
        with suppress(PermissionError), path.open("rb") as file:
            return upright_size(file)
    data = pictures.read(row)  # With the reason if it cannot be read.
    if not data:
        raise BadFileError("empty file")
    return upright_size(io.BytesIO(data))


def is_small(size: int, pictures: PictureSet) -> bool:
    """True for a file that is not empty, and not above the limit."""
    return 0 < size <= pictures.max_file_bytes


def upright_size(file: BinaryIO) -> Size:
    """Width and height of a picture as its EXIF turns it, without decoding it.

    Raises BadFileError.
    """
    Image.MAX_IMAGE_PIXELS = None
    try:
        with Image.open(file, formats=known_formats()) as image:
            orientation = orientation_of(image, file)
            width, height = image.size
    except OSError as error:
        if error.errno:
            raise  # Of the disk, not of what the file holds.
        raise BadFileError("not a readable image: damaged, or cut off") from None
    except Exception:  # Pillow raises any exception on a damaged file.
        raise BadFileError("not a readable image: damaged, or cut off") from None
    if not width or not height:
        raise BadFileError("holds no pixels")
    turned = TURNS.get(orientation) in TURNED
    return Size(height, width) if turned else Size(width, height)


def orientation_of(image: Image.Image, file: BinaryIO) -> int:
    """The EXIF orientation in the header; of a PNG, also behind its pixels."""
    with suppress(Exception):  # As above, of damaged EXIF.
        # Not the method of PNG, which decodes the pixels to find what stands behind them.
        found = Image.Image.getexif(image)
        if image.format == "PNG" and "exif" not in image.info and (late := late_exif(file)):
            found.load(late)
        orientation = found.get(ORIENTATION, 1)
        return orientation if isinstance(orientation, int) else 1
    return 1


def late_exif(file: BinaryIO) -> bytes:
    """The EXIF of a PNG, wherever it stands; b"" without one."""
    file.seek(8)
    while len(head := file.read(8)) == 8:
        length, kind = struct.unpack(">I4s", head)
        if kind == b"eXIf":
            return b"Exif\0\0" + file.read(length) if length <= EXIF_BYTES else b""
        file.seek(length + 4, io.SEEK_CUR)
    return b""


def fit_of(sizes: tuple[Size, ...], picture: Size) -> Fit:
    """The bucket of a picture, as `picture_sizes.fit`. Raises BadFileError for one too thin."""
    found = fit(sizes, picture)
    if len(sizes) > 1 and found.kept < MIN_KEPT:
        raise BadFileError(
            f"{picture.width} x {picture.height} pixels: too thin, of its nearest bucket "
            f"{sizes[found.bucket]} shows {found.kept:.0%} of it"
        )
    return found
