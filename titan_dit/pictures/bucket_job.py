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
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from titan_dit.config.section import UserError
from titan_dit.data.files import BadFileError
from titan_dit.data.manifest import BUCKETS_FORMAT
from titan_dit.data.packing.images import Crop, DecodingBudget
from titan_dit.data.packing.pack import ChunkRecord, ShapeKeys
from titan_dit.pictures.autoencoder import Autoencoder
from titan_dit.pictures.encode import DecodedPicture, EncodeJob, EncodeOptions, make_job
from titan_dit.pictures.picture_set import PictureSet
from titan_dit.pictures.picture_sizes import Size, check_multiples
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

    surveyed: Survey
    """Sizes of the pictures, and why some are left out."""
    bucket_sizes: tuple[Size, ...]
    bucket_shapes: tuple[tuple[int, ...], ...]
    """Shape of a row of each bucket."""
    chosen: NDArray[np.int32]
    """Bucket of each picture. One that is left out stands in any."""

    @property
    def sizes(self) -> tuple[Size, ...]:
        """The sizes of the buckets."""
        return self.bucket_sizes

    @cached_property
    def chunks(self) -> list[tuple[int, Sequence[int]]]:
        """(bucket, listing indices) of each chunk."""
        found: list[tuple[int, Sequence[int]]] = []
        for bucket in range(len(self.bucket_sizes)):
            rows = np.flatnonzero(self.chosen == bucket).tolist()
            for first in range(0, len(rows), self.shard_size):
                found.append((bucket, rows[first : first + self.shard_size]))
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
        return self.bucket_sizes[int(self.chosen[row])]

    def shapes_of(self, records: Sequence[ChunkRecord]) -> ShapeKeys:
        """The buckets that have rows, and the bucket of each shard."""
        counts = [0] * len(self.bucket_sizes)
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

    def digest(self) -> str:
        """SHA-256 of the job, with the bucket of every picture."""
        reasons = json.dumps(sorted(self.surveyed.reasons.items()))
        sha = hashlib.sha256(f"{super().digest()} {reasons}".encode())
        sha.update(self.chosen.tobytes())
        return sha.hexdigest()

    def picture(self, row: int, budget: DecodingBudget) -> DecodedPicture:
        """Decode and crop a picture. Raises BadFileError."""
        if reason := self.surveyed.reasons.get(row):
            raise BadFileError(reason)
        found = super().picture(row, budget)
        if found.size != self.surveyed.size(row):
            raise BadFileError(
                f"{found.size} pixels, but {self.surveyed.size(row)} by its header. Save it upright"
            )
        return found


def make_bucket_job(
    pictures: PictureSet,
    root: Path,
    output: Path,
    vae: Autoencoder | Pixels,
    *,
    sizes: Sequence[Size],
    survey: Survey,
    **how: Any,
) -> EncodeJob:
    """Plan the shards of buckets of these sizes; `how`: fields of EncodeOptions.

    A single square is encoded as `--image-size` does. Raises UserError if the autoencoder cannot
    encode a size, and if no picture can be encoded.
    """
    check_multiples(sizes, vae.facts.factor, vae.source)
    if len(sizes) == 1 and sizes[0].width == sizes[0].height:
        side = sizes[0].width
        return make_job(pictures, root, output, vae, image_size=side, survey=survey, **how)
    options = EncodeOptions(**how)
    options.check()
    chosen, survey = choose_buckets(pictures, root, tuple(sizes), survey)
    shapes = tuple(options.shape(vae, size) for size in sizes)
    largest = max(shapes, key=lambda shape: shape[1] * shape[2])
    keys = {"sizes": list(map(str, sizes)), "crop": CROP}
    return BucketJob(
        pictures,
        root,
        output.resolve().name,
        largest,
        options.dtype,
        options.batch_size,
        0,
        options.flip,
        options.posterior,
        options.units,
        options.about(pictures, root, vae, keys),
        options.max_pixels,
        survey,
        shard_size=options.pictures_per_shard(largest, len(pictures)),
        surveyed=survey,
        bucket_sizes=tuple(sizes),
        bucket_shapes=shapes,
        chosen=chosen,
    )


def choose_buckets(
    pictures: PictureSet, root: Path, sizes: tuple[Size, ...], survey: Survey
) -> tuple[NDArray[np.int32], Survey]:
    """(bucket of each picture, the survey with the pictures that fit no bucket left out).

    Pictures that are left out stand in the first bucket that has others.
    """
    chosen = np.full(len(pictures), -1, np.int32)
    reasons = dict(survey.reasons)
    for row in range(len(pictures)):
        if row not in reasons:
            try:
                chosen[row] = fit_of(sizes, survey.size(row)).bucket
            except BadFileError as error:
                reasons[row] = str(error)
    if (chosen < 0).all():
        raise UserError(
            f"[data encode] none of the {len(pictures):,} files can be encoded. Restore them; the "
            f"first is {root / pictures.names[0]}: {reasons[0]}."
        )
    chosen[chosen < 0] = chosen[chosen >= 0].min()
    return chosen, replace(survey, reasons=dict(sorted(reasons.items())))
