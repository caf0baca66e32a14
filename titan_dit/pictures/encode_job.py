"""A job of `data encode`: everything that determines the bytes of its shards."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Int64, UInt8
from torch import Tensor

from titan_dit.config.section import UserError
from titan_dit.data.files import BadFileError, stamp_of
from titan_dit.data.latents import STORED_DTYPES
from titan_dit.data.manifest import ENCODED_FORMAT
from titan_dit.data.packing.images import Crop, DecodingBudget, decode_image, sides_of
from titan_dit.data.packing.output import SHARD_BYTES, ChunkRecord, ShardJob
from titan_dit.pictures.autoencoder import Autoencoder
from titan_dit.pictures.features import PictureFeatures
from titan_dit.pictures.picture_set import ListingOptions, PictureSet
from titan_dit.pictures.picture_sizes import Size
from titan_dit.pictures.pixels import Pixels
from titan_dit.pictures.report import picture_lines
from titan_dit.pictures.survey import Survey, check_used

CROP = "upright by EXIF; ADM: halve by a box filter, resize by a bicubic one, crop the center"
PICTURES_DIGEST = "pictures_sha256"
"""Key of a chunk's record: SHA-256 over the digests of its pictures' files."""
MIN_SHARD_PICTURES, MAX_CHUNKS = 256, 64
"""Minimum pictures of a shard; maximum chunks of a small dataset, which give many ranks work."""


class DecodedPicture(NamedTuple):
    """A picture, or a clip, decoded and cropped."""

    pixels: UInt8[Tensor, "3 *size"]
    """[3, h, w]; [3, f, h, w] of a clip."""
    digest: bytes
    """SHA-256 of its file."""
    is_converted: bool
    """True if its colours were converted to sRGB."""
    size: Size
    """Size of the whole picture, upright."""
    reference: UInt8[Tensor, "3 *size"] | None = None
    """Its reference, cropped as the picture."""
    mask: UInt8[Tensor, " *size"] | None = None
    """Weight of each latent pixel, 0 to 255."""


@dataclass(frozen=True, kw_only=True)
class EncodeOptions:
    """How pictures are encoded, whatever their size."""

    flip: bool = False
    posterior: Literal["both", "mean"] = "both"
    units: Literal["vae", "measured"] = "vae"
    dtype: str = "float16"
    batch_size: int = 32
    """Rows that are encoded at once, mirror images included. Another number changes bits."""
    shard_size: int | None = None
    """Pictures of a shard; None: `pictures_per_shard` chooses."""
    text: str | None = None
    """Description of the data's origin."""
    max_pixels: int | None = None
    """Maximum pixels of a picture; None: as many as its format's memory allows."""
    first_frame: bool = False
    """Store the latents of each clip's first frame, with grey frames behind it."""
    features: PictureFeatures | None = None
    """Features that are stored beside the latents."""

    @property
    def copies(self) -> int:
        """Rows per picture."""
        return 2 if self.flip else 1

    def __post_init__(self) -> None:
        """Raise UserError for a batch that cuts a picture's rows."""
        if self.flip and self.batch_size % 2:
            raise UserError(
                f"[data encode] batch_size={self.batch_size}: with --flip true a batch holds "
                f"pictures and their mirror images. Set --batch-size {self.batch_size + 1}."
            )

    def shape(
        self, vae: Autoencoder | Pixels, size: Size, frames: int | None = None
    ) -> tuple[int, ...]:
        """Shape of a row of a picture, or of a clip with `frames`; its factor divides `size`."""
        channels = vae.channels * (2 if self.posterior == "both" else 1)
        assert size.height % vae.facts.factor == size.width % vae.facts.factor == 0, size
        sides = size.height // vae.facts.factor, size.width // vae.facts.factor
        if frames is None:
            return channels, *sides
        return channels, 1 + (frames - 1) // vae.facts.frames_factor, *sides

    def pictures_per_shard(self, shape: tuple[int, ...], count: int) -> int:
        """Pictures of a shard of rows of this shape, of `count` in all."""
        bytes_each = math.prod(shape) * STORED_DTYPES[self.dtype].itemsize * self.copies
        bytes_each += self.features.num_bytes * self.copies if self.features else 0
        size = max(MIN_SHARD_PICTURES, -(-count // MAX_CHUNKS))
        return self.shard_size or max(1, min(SHARD_BYTES // bytes_each, size))

    def about(
        self, pictures: PictureSet, root: Path, vae: Autoencoder | Pixels, sizes: dict[str, Any]
    ) -> dict[str, Any]:
        """Keys of the manifest. `sizes`: its keys about the size of pictures."""
        return {
            "source": self.text or f"encoded from {root.resolve().name}",
            "num_classes": pictures.num_classes,
            **({"classes": list(pictures.class_names)} if pictures.class_names else {}),
            "scale": vae.scale,
            "shift": vae.shift,
            "value_range": vae.value_range,
            "vae": vae.entry,
            "posterior": self.posterior if vae.entry else None,
            **({"features": self.features.entry} if self.features else {}),
            **sizes,
            "copies": self.copies,
            "batch_size": self.batch_size,
            "units": self.units,
            **self.about_references(pictures, vae),
        }

    def about_references(
        self, pictures: PictureSet, vae: Autoencoder | Pixels
    ) -> dict[str, dict[str, Any]]:
        """The manifest's `reference`, if there are references."""
        if not self.first_frame and "reference" not in pictures.companions:
            return {}
        kind = "first_frame" if self.first_frame else "picture"
        return {"reference": {"kind": kind, "channels": vae.channels}}


@dataclass(frozen=True, kw_only=True)
class EncodeJob(ShardJob):
    """A set of pictures, and how they are encoded: here as squares of one size."""

    command: ClassVar[str] = "data encode"
    format: ClassVar[str] = ENCODED_FORMAT

    pictures: PictureSet
    how: EncodeOptions
    sizes: tuple[Size, ...]
    """The sizes that pictures are cropped to."""
    survey: Survey | None
    """Sizes of the pictures, for the report; None: no report."""

    @property
    def names(self) -> Sequence[str]:
        """The names of the pictures."""
        return self.pictures.names

    @property
    def labels(self) -> Int64[Tensor, " n"]:
        """Class of each picture; a picture with -1 has none and is dropped."""
        return self.pictures.labels

    @property
    def copies(self) -> int:
        """Rows per picture: 2 with its mirror image, else 1."""
        return self.how.copies

    @property
    def channels(self) -> int:
        """Channels of a latent. A row has twice as many if it holds mean and std."""
        return self.shape[0] // 2 if self.how.posterior == "both" else self.shape[0]

    @property
    def has_masks(self) -> bool:
        """True if some pictures have a mask."""
        return "mask" in self.pictures.companions

    @property
    def reference_channels(self) -> int:
        """Channels of the references' latents; 0 without references."""
        return self.channels if self.about.get("reference") else 0

    def shape_of(self, chunk: int) -> tuple[int, ...]:
        """Shape of a chunk's rows."""
        return self.shape

    def crop_of(self, row: int) -> Crop:
        """The side of the square, or the size, that a picture is cropped to."""
        return self.sizes[0].width

    def batches(self, chunk: int) -> list[Sequence[int]]:
        """The pictures of each batch of a chunk."""
        rows, size = self.rows(chunk), self.pictures_at_once(chunk)
        return [rows[first : first + size] for first in range(0, len(rows), size)]

    def pictures_at_once(self, chunk: int) -> int:
        """Pictures of a batch."""
        return max(1, self.how.batch_size // self.copies)

    def batches_ahead(self, chunk: int, threads: int) -> int:
        """Batches that are decoded, or being decoded, while one is encoded."""
        return 2 + 4 * threads // self.pictures_at_once(chunk)

    def compute_digest(self) -> str:
        """See `ShardJob.digest`; nor does it depend on the folder of the autoencoder."""
        vae = self.about["vae"]
        about = {**self.about, "vae": vae and {**vae, "source": ""}}
        parts = (self.command, self.name, self.shape, self.dtype, self.shard_size)
        how, pictures = (self.how.batch_size, self.how.units), self.pictures
        values = [*parts, *how, about, pictures.kind, list(pictures.texts)]
        sha = hashlib.sha256(json.dumps(values, sort_keys=True).encode())
        sha.update(self.pictures.names.ends.tobytes() + self.pictures.names.block)
        sha.update(self.pictures.labels.numpy().tobytes())
        # Outputs of versions without these limits go on.
        for limit, default in (
            (self.how.max_pixels, None),
            (self.pictures.max_file_bytes, ListingOptions.max_file_bytes),
        ):
            if limit != default:
                sha.update(f" {limit}".encode())
        if self.pictures.companions:
            sha.update(json.dumps(sorted(map(str, self.pictures.companions.items()))).encode())
        if self.pictures.left_out:
            sha.update(json.dumps(sorted(self.pictures.left_out.items())).encode())
        return sha.hexdigest()

    def stamp(self, row: int) -> tuple[int, int]:
        """Length and time of modification of the file that holds a picture.

        With a reference or a mask: lengths in all, and the latest time.
        """
        # Without a path a picture's file holds its reference and its mask, too.
        has_files = self.pictures.path is not None
        companions = self.pictures.companions.values() if has_files else ()
        files = [self.pictures.root / of_row[row] for of_row in companions if row in of_row]
        stamps = [self.pictures.stamp(row), *map(stamp_of, files)]
        return sum(size for size, _ in stamps), max(time for _, time in stamps)

    def has_made(self, record: ChunkRecord, chunk: int) -> bool:
        """True if the kept pictures of a chunk still have the same bytes."""
        if not record.file:
            return True
        lost = {row for row, _ in record.dropped}
        sha = hashlib.sha256()
        for row in self.rows(chunk):
            if row not in lost:
                try:
                    sha.update(self.digest_of(row))
                except BadFileError:
                    return False
        return sha.hexdigest() == record.extra.get(PICTURES_DIGEST)

    def digest_of(self, row: int) -> bytes:
        """SHA-256 of a picture's file, with its reference and its mask. Raises BadFileError."""
        sha = hashlib.sha256(self.pictures.read(row))
        for kind in self.pictures.companions:
            sha.update(self.pictures.read_companion(kind, row) or b"")
        return sha.digest()

    def report_lines(self, records: Sequence[ChunkRecord]) -> Iterator[bytes]:
        """The lines of pictures.jsonl; none without a survey."""
        return iter(()) if self.survey is None else picture_lines(self, self.survey, records)

    def picture(self, row: int, budget: DecodingBudget) -> DecodedPicture:
        """Decode and crop a picture. Raises BadFileError."""
        check_used(self.pictures, row)
        data = self.pictures.read(row)
        if not data:
            raise BadFileError("empty file")
        crop = self.crop_of(row)
        width, height = sides_of(crop)
        found = decode_image(data, crop, (3, height, width), budget)
        size, mask = Size(*found.size), None
        reference = self.companion("reference", row, size, budget)
        if self.has_masks:
            values = self.companion("mask", row, size, budget)
            mask = self.weights(torch.full_like(found.pixels, 255) if values is None else values)
        has_more = bool(self.pictures.companions)
        digest = self.digest_of(row) if has_more else hashlib.sha256(data).digest()
        return DecodedPicture(found.pixels, digest, found.is_converted, size, reference, mask)

    def companion(
        self, kind: str, row: int, size: Size, budget: DecodingBudget
    ) -> UInt8[Tensor, "3 h w"] | None:
        """A picture's reference or mask, cropped as the picture of `size`; None without one.

        Raises BadFileError for one of another size: it would show other places.
        """
        data = self.pictures.read_companion(kind, row)
        if data is None:
            return None
        name, crop = self.pictures.companions[kind][row], self.crop_of(row)
        width, height = sides_of(crop)
        try:
            found = decode_image(data, crop, (3, height, width), budget)
        except BadFileError as error:
            raise BadFileError(f"its {kind} {name}: {error}") from None
        if Size(*found.size) != size:
            raise BadFileError(
                f"its {kind} {name} has {Size(*found.size)} pixels, the picture {size}. Save both "
                "in one size"
            )
        return found.pixels

    def weights(self, mask: UInt8[Tensor, "3 h w"]) -> UInt8[Tensor, "h_latent w_latent"]:
        """The mean of a mask over the pixels of each latent pixel, and over its colours."""
        factor = self.about["vae"]["factor"] if self.about["vae"] else 1
        return F.avg_pool2d(mask.float().mean(0, keepdim=True), factor)[0].round().byte()


def make_job(
    pictures: PictureSet,
    root: Path,
    output: Path,
    vae: Autoencoder | Pixels,
    how: EncodeOptions,
    *,
    image_size: int,
    survey: Survey | None = None,
) -> EncodeJob:
    """Plan the shards of squares, of a size that the autoencoder divides: `check_image_size`."""
    size = Size(image_size, image_size)
    shape = how.shape(vae, size)
    return EncodeJob(
        pictures=pictures,
        how=how,
        sizes=(size,),
        survey=survey,
        root=root,
        name=output.resolve().name,
        shape=shape,
        dtype=how.dtype,
        about=how.about(pictures, root, vae, {"image_size": image_size, "crop": CROP}),
        shard_size=how.pictures_per_shard(shape, len(pictures)),
    )
