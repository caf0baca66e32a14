"""A job of `data encode` with clips of video files; a picture is a clip of one frame.

A bucket is a number of frames and a size. Every row is a clip: a file may give several, or none.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from titan_dit import __version__
from titan_dit.config import limits
from titan_dit.data.files import BadFileError
from titan_dit.data.packing.images import DecodingBudget
from titan_dit.data.packing.output import ChunkRecord
from titan_dit.pictures import clips
from titan_dit.pictures.autoencoder import Autoencoder
from titan_dit.pictures.bucket_job import CROP, BucketJob, choose_buckets
from titan_dit.pictures.clips import Choice, Clip
from titan_dit.pictures.encode_job import DecodedPicture, EncodeJob, EncodeOptions
from titan_dit.pictures.library import video
from titan_dit.pictures.picture_set import PictureSet
from titan_dit.pictures.picture_sizes import Size
from titan_dit.pictures.pixels import Pixels
from titan_dit.pictures.report import clip_lines
from titan_dit.pictures.survey import FoundClips, Survey
from titan_dit.pictures.video_frames import MAX_PIXELS, check_opens

TIMES = "frame j is the one shown (j + 1/2) / fps after the clip's begin"
MAX_AHEAD = 512 << 20
"""Maximum bytes of decoded clips that wait for the autoencoder, with a batch for each thread."""


@dataclass(frozen=True, kw_only=True)
class ClipOptions:
    """Which clips are cut from video files."""

    lengths: tuple[int, ...] = (1,)
    """Frames of clips, in order."""
    fps: float = 16.0
    """Frames per second of a clip."""
    choice: Choice = "first"
    scenes: bool = False
    """True: each scene of a file is cut as a file of its own."""
    max_pixels: int | None = None
    """Maximum pixels of a frame; None: `video_frames.MAX_PIXELS`."""

    @property
    def rate(self) -> Fraction:
        """Frames per second, as a fraction."""
        return clips.rate_of(self.fps)

    def look(self, path: Path) -> tuple[Size, FoundClips]:
        """The size of a video file, and its clips. Raises BadFileError if it has none."""
        found = clips.look(path, scenes=self.scenes, max_pixels=self.max_pixels)
        cut = found.clips(self.lengths, self.rate, self.choice)
        starts = tuple(found.seconds(clip, self.rate) for clip in cut)
        notes = (*found.notes, *found.too_short(min(self.lengths), self.rate))
        used = found.num_used(cut, self.rate)
        return found.size, FoundClips(tuple(cut), starts, len(found.times), used, notes)

    def key(self) -> str:
        """Digest of the options and the versions that read videos: looks depend on them."""
        versions = [__version__, video("[data encode]").__version__]
        values = [*asdict(self).values(), limits.raised(MAX_PIXELS), *versions]
        return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]

    def about(self) -> dict[str, Any]:
        """Keys of the manifest."""
        return {
            "frames": list(self.lengths),
            "fps": self.fps,
            "clip": self.choice,
            "scenes": self.scenes,
            "times": TIMES,
        }


@dataclass(frozen=True, kw_only=True)
class ClipJob(BucketJob):
    """Clips, and the bucket of each. `pictures` and `survey` have a row for each clip."""

    asked: ClipOptions
    listed: PictureSet
    """The files."""
    looked: Survey
    """Sizes and clips of the files."""
    files: tuple[int, ...]
    """Listing index of the file of each row, in order."""
    cut: tuple[Clip | None, ...]
    """The clip of each row; None for a picture, and for a file that is left out."""
    bucket_frames: tuple[int, ...]
    """Frames of the clips of each bucket."""

    def frames_of(self, chunk: int) -> int:
        """Frames of the clips of a chunk."""
        return self.bucket_frames[self.chunks[chunk][0]]

    def pictures_at_once(self, chunk: int) -> int:
        """Clips of a batch, whose frames are `batch_size`; one clip at least."""
        return max(1, self.how.batch_size // (self.copies * self.frames_of(chunk)))

    def batches_ahead(self, chunk: int, threads: int) -> int:
        """Batches that are decoded while one is encoded: few if clips are large."""
        at_once = self.pictures_at_once(chunk)
        size = self.sizes[self.chunks[chunk][0]]
        fitting = MAX_AHEAD // (3 * size.pixels * self.frames_of(chunk) * at_once)
        return max(1 + -(-threads // at_once), min(fitting, super().batches_ahead(chunk, threads)))

    def compute_digest(self) -> str:
        """See `BucketJob.compute_digest`: with the clip of every row."""
        rows = json.dumps([self.files, self.cut])
        return hashlib.sha256(f"{super().compute_digest()} {rows}".encode()).hexdigest()

    def digest_of(self, row: int) -> bytes:
        """SHA-256 of a row's file. Raises BadFileError."""
        if self.cut[row] is None:
            return super().digest_of(row)
        return file_digest(self.path(row), self.stamp(row))

    def path(self, row: int) -> Path:
        """The file of a row that is a clip of a video."""
        assert self.pictures.path is not None
        return self.pictures.path(row)

    def picture(self, row: int, budget: DecodingBudget) -> DecodedPicture:
        """Decode and crop a clip. Raises BadFileError."""
        clip = self.cut[row]
        if clip is None:
            if self.how.first_frame:
                raise BadFileError("a picture has no frames after the first one")
            found = super().picture(row, budget)
            reference, mask = found.reference, found.mask
            return found._replace(
                pixels=found.pixels[:, None],
                reference=None if reference is None else reference[:, None],
                mask=None if mask is None else mask[None],
            )
        crop = self.crop_of(row)
        pixels = clips.read_clip(self.path(row), clip, self.asked.rate, crop, self.asked.max_pixels)
        mask = None
        if self.has_masks:  # Of pictures beside it.
            mask = torch.full(self.bucket_shapes[self.chosen[row]][1:], 255, dtype=torch.uint8)
        size = self.survey.size(row)
        return DecodedPicture(pixels, self.digest_of(row), False, size, mask=mask)

    def report_lines(self, records: Sequence[ChunkRecord]) -> Iterator[bytes]:
        """The lines of pictures.jsonl: one for each file."""
        return clip_lines(self, records)


@lru_cache(1024)
def file_digest(path: Path, stamp: tuple[int, int]) -> bytes:
    """SHA-256 of a file: its clips ask one after another. `stamp`: its length and time."""
    check_opens(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def make_clip_job(
    pictures: PictureSet,
    root: Path,
    output: Path,
    vae: Autoencoder | Pixels,
    how: EncodeOptions,
    *,
    sizes: Sequence[Size],
    survey: Survey,
    asked: ClipOptions,
) -> EncodeJob:
    """Plan the shards of clips of sizes and lengths that the autoencoder takes: `picture_sizes`.

    Raises UserError if no file can be encoded.
    """
    files, cut = rows_of(pictures, survey)
    frames = tuple(sorted({1, *asked.lengths}))
    buckets = [(length, size) for length in frames for size in sizes]
    lengths = [frames.index(clip.frames if clip else 1) for clip in cut]
    fix = "Restore them, or lower --frames"
    chosen, reasons = choose_buckets(pictures, survey, tuple(sizes), files, lengths, fix)
    expanded = pictures.of_rows(files, names_of(pictures, files))
    shapes = tuple(how.shape(vae, size, length) for length, size in buckets)
    largest = max(shapes, key=math.prod)
    keys = {"sizes": list(map(str, sizes)), "crop": CROP, **asked.about()}
    return ClipJob(
        pictures=expanded,
        how=how,
        sizes=tuple(size for _, size in buckets),
        survey=Survey(survey.sizes[list(files)], reasons),
        root=root,
        name=output.resolve().name,
        shape=largest,
        dtype=how.dtype,
        about=how.about(expanded, root, vae, keys),
        shard_size=how.pictures_per_shard(largest, len(files)),
        bucket_shapes=shapes,
        shard_sizes=tuple(how.pictures_per_shard(shape, len(files)) for shape in shapes),
        chosen=chosen,
        asked=asked,
        listed=pictures,
        looked=survey,
        files=files,
        cut=cut,
        bucket_frames=tuple(length for length, _ in buckets),
    )


def rows_of(
    pictures: PictureSet, survey: Survey
) -> tuple[tuple[int, ...], tuple[Clip | None, ...]]:
    """(file, clip) of each row: a row for each clip, and for each file without one."""
    files: list[int] = []
    cut: list[Clip | None] = []
    for file in range(len(pictures)):
        found = survey.clips.get(file)
        of_file: Sequence[Clip | None] = found.clips if found else (None,)
        files += [file] * len(of_file)
        cut += of_file
    return tuple(files), tuple(cut)


def names_of(pictures: PictureSet, files: Sequence[int]) -> list[str]:
    """The name of each clip: its file's, with a number if the file has several."""
    several = np.bincount(files) > 1
    places = np.arange(len(files)) - np.searchsorted(files, files)
    return [
        f"{pictures.names[file]}#{place + 1}" if several[file] else pictures.names[file]
        for file, place in zip(files, places.tolist(), strict=True)
    ]
