"""A job of `data encode` whose pictures have several shapes: each is cropped to its bucket.

A chunk, and so a shard, holds pictures of one bucket; those of a bucket follow each other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from titan_dit.config.section import UserError
from titan_dit.data.files import BadFileError
from titan_dit.data.manifest import BUCKETS_FORMAT
from titan_dit.data.packing.images import Crop, DecodingBudget
from titan_dit.data.packing.output import ChunkRecord, ShapeKeys
from titan_dit.pictures.autoencoder import Autoencoder
from titan_dit.pictures.encode_job import DecodedPicture, EncodeJob, EncodeOptions, make_job
from titan_dit.pictures.picture_set import PictureSet
from titan_dit.pictures.picture_sizes import Size
from titan_dit.pictures.pixels import Pixels
from titan_dit.pictures.survey import Survey, fit_of

CROP = (
    "upright by EXIF; the bucket of the nearest aspect ratio; ADM: halve by a box filter, resize "
    "by a bicubic one to cover the bucket, crop the center"
)


@dataclass(frozen=True, kw_only=True)
class BucketJob(EncodeJob):
    """A set of pictures, and the bucket of each."""

    format: ClassVar[str] = BUCKETS_FORMAT

    survey: Survey
    """Sizes of the pictures, and why some are left out."""
    bucket_shapes: tuple[tuple[int, ...], ...]
    """Shape of a row of each bucket."""
    shard_sizes: tuple[int, ...]
    """Pictures of a shard of each bucket."""
    chosen: NDArray[np.int32]
    """Bucket of each picture, a place in `sizes`. One that is left out stands in any."""

    @cached_property
    def chunks(self) -> list[tuple[int, Sequence[int]]]:
        """(bucket, listing indices) of each chunk."""
        found: list[tuple[int, Sequence[int]]] = []
        for bucket, size in enumerate(self.shard_sizes):
            rows = np.flatnonzero(self.chosen == bucket).tolist()
            found += [(bucket, rows[first : first + size]) for first in range(0, len(rows), size)]
        return found

    @property
    def num_chunks(self) -> int:
        """Number of chunks."""
        return len(self.chunks)

    def rows(self, chunk: int) -> Sequence[int]:
        """Listing indices of a chunk's pictures."""
        return self.chunks[chunk][1]

    def shape_of(self, chunk: int) -> tuple[int, ...]:
        """Shape of the rows of a chunk's bucket."""
        return self.bucket_shapes[self.chunks[chunk][0]]

    def crop_of(self, row: int) -> Crop:
        """The size of a picture's bucket."""
        return self.sizes[int(self.chosen[row])]

    def shapes_of(self, records: Sequence[ChunkRecord]) -> ShapeKeys:
        """The buckets that have rows, and the bucket of each shard."""
        counts = [0] * len(self.sizes)
        for (bucket, _), record in zip(self.chunks, records, strict=True):
            counts[bucket] += record.count
        filled = [bucket for bucket, count in enumerate(counts) if count]
        numbers = {bucket: number for number, bucket in enumerate(filled)}
        buckets = [
            {"shape": list(self.bucket_shapes[bucket]), "count": counts[bucket]}
            for bucket in filled
        ]
        # A chunk without rows has no shard.
        return {"buckets": buckets}, [{"bucket": numbers.get(bucket)} for bucket, _ in self.chunks]

    def compute_digest(self) -> str:
        """See `EncodeJob.compute_digest`: with the bucket of every picture."""
        reasons = json.dumps(sorted(self.survey.reasons.items()))
        sha = hashlib.sha256(f"{super().compute_digest()} {reasons}".encode())
        sha.update(self.chosen.tobytes())
        return sha.hexdigest()

    def picture(self, row: int, budget: DecodingBudget) -> DecodedPicture:
        """Decode and crop a picture. Raises BadFileError."""
        if reason := self.survey.reasons.get(row):
            raise BadFileError(reason)
        found = super().picture(row, budget)
        if found.size != self.survey.size(row):
            raise BadFileError(
                f"{found.size} pixels, but {self.survey.size(row)} by its header. Save it upright"
            )
        return found


def make_bucket_job(
    pictures: PictureSet,
    root: Path,
    output: Path,
    vae: Autoencoder | Pixels,
    how: EncodeOptions,
    *,
    sizes: Sequence[Size],
    survey: Survey,
) -> EncodeJob:
    """Plan the shards of buckets of these sizes, which the autoencoder divides: `check_multiples`.

    A single square is encoded as `--image-size` does. Raises UserError if no picture can be
    encoded.
    """
    if len(sizes) == 1 and sizes[0].width == sizes[0].height:
        side = sizes[0].width
        return make_job(pictures, root, output, vae, how, image_size=side, survey=survey)
    rows = range(len(pictures))
    chosen, reasons = choose_buckets(pictures, survey, tuple(sizes), rows, [0] * len(rows))
    shapes = tuple(how.shape(vae, size) for size in sizes)
    largest = max(shapes, key=lambda shape: shape[1] * shape[2])
    shard_size = how.pictures_per_shard(largest, len(pictures))
    keys = {"sizes": list(map(str, sizes)), "crop": CROP}
    return BucketJob(
        pictures=pictures,
        how=how,
        sizes=tuple(sizes),
        survey=replace(survey, reasons=reasons),
        root=root,
        name=output.resolve().name,
        shape=largest,
        dtype=how.dtype,
        about=how.about(pictures, root, vae, keys),
        shard_size=shard_size,
        bucket_shapes=shapes,
        shard_sizes=(shard_size,) * len(sizes),
        chosen=chosen,
    )


def choose_buckets(
    pictures: PictureSet,
    survey: Survey,
    sizes: tuple[Size, ...],
    files: Sequence[int],
    lengths: Sequence[int],
    fix: str = "Restore them",
) -> tuple[NDArray[np.int32], dict[int, str]]:
    """(bucket of each row, row -> why it is left out). Buckets are ordered by length, then size.

    `files`: the file of each row, a row of `pictures`; `lengths`: the place of its number of frames
    among the buckets', 0 for pictures. Rows that are left out stand in the first bucket that has
    others. Raises UserError, with the advice `fix`, if all are.
    """
    chosen = np.full(len(files), -1, np.int32)
    reasons: dict[int, str] = {}
    for row, (file, length) in enumerate(zip(files, lengths, strict=True)):
        reason = survey.reasons.get(file, "")
        if not reason:
            try:
                chosen[row] = length * len(sizes) + fit_of(sizes, survey.size(file)).bucket
                continue
            except BadFileError as error:
                reason = str(error)
        reasons[row] = reason
    if (chosen < 0).all():
        raise UserError(
            f"[data encode] none of the {len(pictures):,} files can be encoded. {fix}; the first "
            f"is {pictures.root / pictures.names[0]}: {reasons[0]}."
        )
    chosen[chosen < 0] = chosen[chosen >= 0].min()
    return chosen, reasons
