"""What `data encode` writes, chunk by chunk: everything that determines its bytes."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from jaxtyping import Int64, UInt8
from torch import Tensor

from titan_dit.config.section import UserError
from titan_dit.data.files import BadFileError
from titan_dit.data.latents import STORED_DTYPES
from titan_dit.data.manifest import ENCODED_FORMAT
from titan_dit.data.packing.images import DecodingBudget, decode_image
from titan_dit.data.packing.pack import SHARD_BYTES
from titan_dit.data.packing.shard_job import ChunkRecord, Chunks
from titan_dit.pictures.autoencoder import Autoencoder
from titan_dit.pictures.picture_set import UNLABELLED, Asked, PictureSet

CROP = "upright by EXIF; ADM: halve by a box filter, resize by a bicubic one, crop the center"
PICTURES = "pictures_sha256"
"""Of a chunk's record: SHA-256 over those of its pictures' files."""
FEWEST, MOST_CHUNKS = 256, 64
"""Pictures of a shard at least; chunks of a small dataset, so that many ranks have work."""


class Picture(NamedTuple):
    """A picture, decoded and cropped."""

    pixels: UInt8[Tensor, "3 s s"]
    digest: bytes
    """SHA-256 of its file."""
    is_converted: bool
    """True if its colours were of another space than sRGB."""


@dataclass(frozen=True)
class EncodePlan(Chunks):
    """A set of pictures, and how they are encoded. See `packing.shard_job.ShardPlan`."""

    command: ClassVar[str] = "data encode"
    format: ClassVar[str] = ENCODED_FORMAT

    pictures: PictureSet
    root: Path
    """The input."""
    name: str
    """Prefix of the files: NAME-00000.safetensors."""
    shape: tuple[int, int, int]
    dtype: str
    batch_size: int
    """Rows that are encoded at once, including mirror images: other numbers change bits."""
    image_size: int
    flip: bool
    posterior: Literal["both", "mean"]
    units: Literal["vae", "measured"]
    about: dict[str, Any]
    """Further keys of the manifest."""
    max_pixels: int | None = None
    """Of a picture that is read; None: by the memory that its format takes."""

    @property
    def names(self) -> Sequence[str]:
        """The names of the pictures."""
        return self.pictures.names

    @property
    def labels(self) -> Int64[Tensor, " n"]:
        """Their classes; -1: it has none, and is dropped."""
        return self.pictures.labels

    @property
    def copies(self) -> int:
        """Rows of a picture: it, and its mirror image."""
        return 2 if self.flip else 1

    @property
    def channels(self) -> int:
        """Channels of a latent, of which a row may hold a mean and a std."""
        return self.shape[0] // 2 if self.posterior == "both" else self.shape[0]

    def batches(self, chunk: int) -> list[range]:
        """The pictures of each batch of a chunk."""
        rows, size = self.rows(chunk), max(1, self.batch_size // self.copies)
        return [rows[first : first + size] for first in range(0, len(rows), size)]

    def digest(self) -> str:
        """SHA-256 of the plan, independent of the folders of input, output and autoencoder."""
        about = {**self.about, "vae": {**self.about["vae"], "source": ""}}
        parts = (self.command, self.name, self.shape, self.dtype, self.shard_size, self.batch_size)
        values = [*parts, self.units, about, self.pictures.kind, list(self.pictures.texts)]
        sha = hashlib.sha256(json.dumps(values, sort_keys=True).encode())
        sha.update(self.pictures.names.ends.tobytes() + self.pictures.names.block)
        sha.update(self.pictures.labels.numpy().tobytes())
        # Outputs of versions without these limits go on.
        for limit, default in (
            (self.max_pixels, None),
            (self.pictures.max_file_bytes, Asked.max_file_bytes),
        ):
            if limit != default:
                sha.update(f" {limit}".encode())
        return sha.hexdigest()

    def stamp(self, row: int) -> tuple[int, int]:
        """Length and time of modification of the file that holds a picture."""
        return self.pictures.stamp(row)

    def has_made(self, record: ChunkRecord, chunk: int) -> bool:
        """True if the pictures of a chunk that were kept have the same bytes."""
        if not record.file:
            return True
        lost = {row for row, _ in record.dropped}
        sha = hashlib.sha256()
        for row in self.rows(chunk):
            if row not in lost:
                try:
                    sha.update(hashlib.sha256(self.pictures.read(row)).digest())
                except BadFileError:
                    return False
        return sha.hexdigest() == record.extra.get(PICTURES)

    def picture(self, row: int, budget: DecodingBudget) -> Picture:
        """Decode and crop a picture. Raises BadFileError."""
        if int(self.pictures.labels[row]) < 0:
            raise BadFileError(UNLABELLED)
        data = self.pictures.read(row)
        if not data:
            raise BadFileError("empty file")
        size = self.image_size
        found = decode_image(data, size, (3, size, size), budget)
        return Picture(found.pixels, hashlib.sha256(data).digest(), found.is_converted)


def make_plan(
    pictures: PictureSet,
    root: Path,
    output: Path,
    vae: Autoencoder,
    *,
    image_size: int,
    flip: bool = False,
    posterior: Literal["both", "mean"] = "both",
    units: Literal["vae", "measured"] = "vae",
    dtype: str = "float16",
    batch_size: int = 32,
    shard_size: int | None = None,
    text: str | None = None,
    max_pixels: int | None = None,
) -> EncodePlan:
    """Plan the shards. Raises UserError if the autoencoder cannot encode this size."""
    factor = vae.facts.factor
    if image_size % factor:
        near = max(factor, round(image_size / factor) * factor)
        raise UserError(
            f"[data encode] image_size={image_size} is no multiple of {factor}, by which "
            f"{vae.source} divides a side. Set --image-size {near}."
        )
    if flip and batch_size % 2:
        raise UserError(
            f"[data encode] batch_size={batch_size}: with --flip true a batch holds pictures and "
            f"their mirror images. Set --batch-size {batch_size + 1}."
        )
    side = image_size // factor
    shape = (vae.channels * (2 if posterior == "both" else 1), side, side)
    bytes_each = math.prod(shape) * STORED_DTYPES[dtype].itemsize * (2 if flip else 1)
    size = max(FEWEST, -(-len(pictures) // MOST_CHUNKS))
    about = {
        "source": text or f"encoded from {root.resolve().name}",
        "num_classes": pictures.num_classes,
        **({"classes": list(pictures.class_names)} if pictures.class_names else {}),
        "scale": vae.scale,
        "shift": vae.shift,
        "value_range": None,
        "vae": {
            "class": vae.facts.kind,
            "source": vae.source,
            "digest": vae.facts.digest,
            "factor": factor,
        },
        "posterior": posterior,
        "image_size": image_size,
        "crop": CROP,
        "copies": 2 if flip else 1,
        "batch_size": batch_size,
        "units": units,
    }
    return EncodePlan(
        pictures,
        root,
        output.resolve().name,
        shape,
        dtype,
        batch_size,
        image_size,
        flip,
        posterior,
        units,
        about,
        max_pixels,
        shard_size=shard_size or max(1, min(SHARD_BYTES // bytes_each, size)),
    )
