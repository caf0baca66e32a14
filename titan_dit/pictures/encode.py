"""Encode pictures, or clips, into shards; threads decode ahead of the autoencoder.

The job's fields are everything that determines a chunk's bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64, Shaped, UInt8
from torch import Tensor

from titan_dit.config.section import UserError
from titan_dit.data.files import BadFileError, stamp_of
from titan_dit.data.latent_facts import FEATURES
from titan_dit.data.latents import STORED_DTYPES
from titan_dit.data.manifest import ENCODED_FORMAT, MANIFEST, digest_of
from titan_dit.data.packing import pack
from titan_dit.data.packing.images import Crop, DecodingBudget, decode_image, sides_of
from titan_dit.data.packing.pack import (
    CONVERTED,
    SHARD_BYTES,
    ChunkRecord,
    Chunks,
    ShapeKeys,
    write_chunk,
    writing,
)
from titan_dit.pictures.autoencoder import Autoencoder
from titan_dit.pictures.features import PictureFeatures
from titan_dit.pictures.picture_set import UNLABELLED, ListingOptions, PictureSet
from titan_dit.pictures.picture_sizes import Size
from titan_dit.pictures.pixels import Pixels
from titan_dit.pictures.report import picture_lines
from titan_dit.pictures.survey import Survey
from titan_dit.system.files import write_whole
from titan_dit.system.host_copy import HostCopy

CROP = "upright by EXIF; ADM: halve by a box filter, resize by a bicubic one, crop the center"
MASKS = "mask"
"""Key of a chunk's record: sum and number of the values of its masks."""
PICTURES = "pictures_sha256"
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


@dataclass(frozen=True)
class EncodeJob(Chunks):
    """A set of pictures, and how they are encoded. See `packing.pack.Chunks`."""

    command: ClassVar[str] = "data encode"
    format: ClassVar[str] = ENCODED_FORMAT

    pictures: PictureSet
    root: Path
    """The input."""
    name: str
    """Prefix of the files: NAME-00000.safetensors."""
    shape: tuple[int, ...]
    """[c, h, w] of a picture's row, [c, f, h, w] of a clip's; the largest one."""
    dtype: str
    batch_size: int
    """Rows that are encoded at once, mirror images included. Another number changes bits."""
    image_size: int
    flip: bool
    posterior: Literal["both", "mean"]
    units: Literal["vae", "measured"]
    about: dict[str, Any]
    """Further keys of the manifest."""
    max_pixels: int | None = None
    """Maximum pixels of a picture; None: as many as its format's memory allows."""
    survey: Survey | None = None
    """Sizes of the pictures, for the report; it changes no shard. None: no report."""

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
        return 2 if self.flip else 1

    @property
    def channels(self) -> int:
        """Channels of a latent. A row has twice as many if it holds mean and std."""
        return self.shape[0] // 2 if self.posterior == "both" else self.shape[0]

    @property
    def sizes(self) -> tuple[Size, ...]:
        """The sizes that pictures are cropped to."""
        return (Size(self.image_size, self.image_size),)

    @property
    def has_masks(self) -> bool:
        """True if some pictures have a mask."""
        return "mask" in self.pictures.companions

    @property
    def reference_channels(self) -> int:
        """Channels of the references' latents; 0 without references."""
        return self.channels if self.about.get("reference") else 0

    @property
    def first_frame(self) -> bool:
        """True if references are the first frames of clips."""
        return self.reference_channels > 0 and self.about["reference"]["kind"] == "first_frame"

    def shape_of(self, chunk: int) -> tuple[int, ...]:
        """Shape of a chunk's rows."""
        return self.shape

    def crop_of(self, row: int) -> Crop:
        """The size that a picture is cropped to."""
        return self.image_size

    def shapes_of(self, records: Sequence[ChunkRecord]) -> ShapeKeys:
        """Keys of the manifest about the shape of rows."""
        return pack.one_shape(self, records)

    def batches(self, chunk: int) -> list[Sequence[int]]:
        """The pictures of each batch of a chunk."""
        rows, size = self.rows(chunk), self.pictures_at_once(chunk)
        return [rows[first : first + size] for first in range(0, len(rows), size)]

    def pictures_at_once(self, chunk: int) -> int:
        """Pictures of a batch."""
        return max(1, self.batch_size // self.copies)

    def batches_ahead(self, chunk: int, threads: int) -> int:
        """Batches that are decoded, or being decoded, while one is encoded."""
        return 2 + 4 * threads // self.pictures_at_once(chunk)

    def digest(self) -> str:
        """SHA-256 of the job, independent of the folders of input, output and autoencoder."""
        vae = self.about["vae"]
        about = {**self.about, "vae": vae and {**vae, "source": ""}}
        parts = (self.command, self.name, self.shape, self.dtype, self.shard_size, self.batch_size)
        values = [*parts, self.units, about, self.pictures.kind, list(self.pictures.texts)]
        sha = hashlib.sha256(json.dumps(values, sort_keys=True).encode())
        sha.update(self.pictures.names.ends.tobytes() + self.pictures.names.block)
        sha.update(self.pictures.labels.numpy().tobytes())
        # Outputs of versions without these limits go on.
        for limit, default in (
            (self.max_pixels, None),
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
        return sha.hexdigest() == record.extra.get(PICTURES)

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
        if reason := self.pictures.left_out.get(row):
            raise BadFileError(reason)
        if int(self.pictures.labels[row]) < 0:
            raise BadFileError(UNLABELLED)
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
        sha = hashlib.sha256(data)
        if self.pictures.companions:
            return DecodedPicture(
                found.pixels, self.digest_of(row), found.is_converted, size, reference, mask
            )
        return DecodedPicture(found.pixels, sha.digest(), found.is_converted, size)

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


@dataclass(frozen=True, kw_only=True)
class EncodeOptions:
    """How pictures are encoded, whatever their size."""

    flip: bool = False
    posterior: Literal["both", "mean"] = "both"
    units: Literal["vae", "measured"] = "vae"
    dtype: str = "float16"
    batch_size: int = 32
    shard_size: int | None = None
    text: str | None = None
    """Description of the data's origin."""
    max_pixels: int | None = None
    first_frame: bool = False
    """Store the latents of each clip's first frame, with grey frames behind it."""
    features: PictureFeatures | None = None
    """Features that are stored beside the latents."""

    @property
    def copies(self) -> int:
        """Rows per picture."""
        return 2 if self.flip else 1

    def check(self) -> None:
        """Raise UserError for a batch that cuts a picture's rows."""
        if self.flip and self.batch_size % 2:
            raise UserError(
                f"[data encode] batch_size={self.batch_size}: with --flip true a batch holds "
                f"pictures and their mirror images. Set --batch-size {self.batch_size + 1}."
            )

    def shape(
        self, vae: Autoencoder | Pixels, size: Size, frames: int | None = None
    ) -> tuple[int, ...]:
        """Shape of a row of a picture of this size; of a clip with `frames`."""
        channels = vae.channels * (2 if self.posterior == "both" else 1)
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
        """Keys of the manifest. `sizes`: those about the size of pictures."""
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


def make_job(
    pictures: PictureSet,
    root: Path,
    output: Path,
    vae: Autoencoder | Pixels,
    *,
    image_size: int,
    survey: Survey | None = None,
    **how: Any,
) -> EncodeJob:
    """Plan the shards of squares; `how`: fields of EncodeOptions.

    Raises UserError if the autoencoder cannot encode this size.
    """
    factor, options = vae.facts.factor, EncodeOptions(**how)
    if image_size % factor:
        near = max(factor, round(image_size / factor) * factor)
        raise UserError(
            f"[data encode] image_size={image_size} is no multiple of {factor}, by which "
            f"{vae.source} divides a side. Set --image-size {near}."
        )
    options.check()
    shape = options.shape(vae, Size(image_size, image_size))
    return EncodeJob(
        pictures,
        root,
        output.resolve().name,
        shape,
        options.dtype,
        options.batch_size,
        image_size,
        options.flip,
        options.posterior,
        options.units,
        options.about(pictures, root, vae, {"image_size": image_size, "crop": CROP}),
        options.max_pixels,
        survey,
        shard_size=options.pictures_per_shard(shape, len(pictures)),
    )


Drops = list[tuple[int, str]]
Reading = Future[DecodedPicture]
AHEAD = 2
"""Batches queued on the device behind the one that the host waits for."""
MAX_AHEAD = 512 << 20
"""Maximum bytes of decoded pictures that wait for the autoencoder, with a batch for each thread."""


@dataclass
class Waited:
    """How long the autoencoder waited for decoded pictures."""

    seconds: float = 0.0
    total: float = 0.0
    """Seconds of encoding, with the waiting."""

    @classmethod
    def joined(cls, parts: Sequence[Waited]) -> Waited:
        """That of all ranks."""
        return cls(sum(part.seconds for part in parts), sum(part.total for part in parts))

    def __str__(self) -> str:
        """A share, for the console."""
        return f"{self.seconds / max(self.total, 1e-9):.0%}"


@dataclass(frozen=True)
class PictureBatch:
    """Decoded pictures of one chunk."""

    chunk: int
    rows: list[int]
    """Numbers of the pictures that could be decoded."""
    digests: list[bytes]
    """SHA-256 of their files."""
    pictures: UInt8[Tensor, "b 3 *size"] | None
    """None if all were dropped."""
    dropped: Drops
    num_converted: int
    """Pictures whose colours were converted to sRGB."""
    references: UInt8[Tensor, "b 3 *size"] | None = None
    masks: UInt8[Tensor, "b *latent_size"] | None = None


@dataclass
class EncodedChunk:
    """The encoded part of a chunk."""

    number: int
    latents: list[Tensor] = field(default_factory=list)
    """Of references, too: their channels stand behind those of the pictures."""
    masks: list[Tensor] = field(default_factory=list)
    features: list[Tensor] = field(default_factory=list)
    """Empty without any."""
    rows: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    dropped: Drops = field(default_factory=list)
    num_converted: int = 0


def missing_chunks(job: EncodeJob, output: Path, verify: bool) -> list[int] | None:
    """Numbers of the missing chunks; None if the output is whole. Needs the output's lock."""
    finished = pack.resumed(job, output, job.digest(), verify)
    if finished is None:
        return None
    return [chunk for chunk in range(job.num_chunks) if chunk not in finished]


def encode_chunks(
    job: EncodeJob,
    vae: Autoencoder | Pixels,
    output: Path,
    chunks: Sequence[int],
    threads: int,
    report: Callable[[int, int], None],
    features: PictureFeatures | None = None,
) -> Waited:
    """Encode and write chunks; `report` gets increments of (pictures done, of which dropped).

    `features`: those that `job` says are stored, too.
    """
    digest = job.digest()
    chunk: EncodedChunk | None = None
    waited, begun = Waited(), time.perf_counter()
    try:
        with same_bits():
            batches = decoded(job, vae, chunks, threads, waited)
            for batch, stored in encoded(job, vae, batches, features):
                if chunk is None or chunk.number != batch.chunk:
                    if chunk:
                        write(job, digest, output, chunk)
                    chunk = EncodedChunk(batch.chunk)
                dropped = len(chunk.dropped)
                add(job, chunk, batch, stored)
                more = len(chunk.dropped) - dropped
                report(len(batch.rows) + len(batch.dropped), more)
        if chunk:
            write(job, digest, output, chunk)
    except OSError as error:
        raise UserError(f"[data encode] {error}") from None
    waited.total = time.perf_counter() - begun
    return waited


@contextmanager
def same_bits() -> Iterator[None]:
    """Make equal pictures equal bits: one torch thread, deterministic cuDNN kernels."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
            yield
    finally:
        torch.set_num_threads(threads)


def decoded(
    job: EncodeJob,
    vae: Autoencoder | Pixels,
    chunks: Sequence[int],
    threads: int,
    waited: Waited,
) -> Iterator[PictureBatch]:
    """Decode the pictures of all chunks in threads, some batches ahead. Counts what is `waited`."""
    pinned = vae.device.type == "cuda"
    waiting: deque[tuple[int, Sequence[int], list[Reading]]] = deque()
    budget = DecodingBudget(job.max_pixels, flag="--max-pixels")
    with ThreadPoolExecutor(threads) as pool:
        try:
            for chunk in chunks:
                for rows in job.batches(chunk):
                    readings = [pool.submit(job.picture, row, budget) for row in rows]
                    waiting.append((chunk, rows, readings))
                    if len(waiting) > job.batches_ahead(chunk, threads):
                        yield joined(*waiting.popleft(), pinned, waited)
            while waiting:
                yield joined(*waiting.popleft(), pinned, waited)
        finally:
            pool.shutdown(cancel_futures=True)


def joined(
    chunk: int, rows: Sequence[int], readings: list[Reading], pinned: bool, waited: Waited
) -> PictureBatch:
    """A batch of the pictures that could be decoded."""
    begun = time.perf_counter()
    wait(readings)
    waited.seconds += time.perf_counter() - begun
    kept, found, dropped = [], [], []
    for row, reading in zip(rows, readings, strict=True):
        try:
            found.append(reading.result())
        except BadFileError as error:
            dropped.append((row, str(error)))
            continue
        kept.append(row)

    def stacked(parts: list[Tensor | None]) -> Tensor | None:
        there = [part for part in parts if part is not None]
        whole = torch.stack(there) if there else None
        return whole.pin_memory() if whole is not None and pinned else whole

    return PictureBatch(
        chunk,
        kept,
        [picture.digest for picture in found],
        stacked([picture.pixels for picture in found]),
        dropped,
        sum(picture.is_converted for picture in found),
        stacked([picture.reference for picture in found]),
        stacked([picture.mask for picture in found]),
    )


def encoded(
    job: EncodeJob,
    vae: Autoencoder | Pixels,
    batches: Iterator[PictureBatch],
    features: PictureFeatures | None = None,
) -> Iterator[tuple[PictureBatch, list[Tensor]]]:
    """Each batch with its rows on the CPU: [pictures, copies, c, h, w], or [..., c, f, h, w].

    With `features` also theirs: [pictures, copies, rows, columns, dim]. [] if all pictures were
    dropped.

    AHEAD batches are queued behind the one that is waited for. A GPU works on them while the host
    adds rows, writes shards and joins the next batch.
    """
    queued: deque[tuple[PictureBatch, list[HostCopy]]] = deque()
    for batch in batches:
        started = []
        if batch.pictures is not None:
            images = with_copies(job, batch.pictures.to(vae.device, non_blocking=True))
            started.append(HostCopy(latents_of(job, vae, images, batch.references)))
            if features:
                found = features.of(images)
                started.append(HostCopy(found.view(-1, job.copies, *found.shape[1:])))
        queued.append((batch, started))
        if len(queued) > AHEAD:
            yield rows_of(*queued.popleft())
    while queued:
        yield rows_of(*queued.popleft())


def rows_of(batch: PictureBatch, stored: list[HostCopy]) -> tuple[PictureBatch, list[Tensor]]:
    """Wait for the rows of a batch."""
    return batch, [copy.read() for copy in stored]


GREY = 127.5
"""Value of a pixel that is not given: 0 of an autoencoder's input."""


def latents_of(
    job: EncodeJob,
    vae: Autoencoder | Pixels,
    images: UInt8[Tensor, "bk 3 *size"],
    references: UInt8[Tensor, "b 3 *size"] | None = None,
) -> Shaped[Tensor, "b k c *found"]:
    """The rows of pictures: unscaled mean and std of each, or the mean alone, or the pixels.

    Behind them the means of their references, or of the first frames of clips.
    """
    mean, std = vae.encode(images)
    rows = [mean, std] if job.posterior == "both" else [mean]
    if references is not None:
        rows.append(vae.encode(with_copies(job, references.to(vae.device, non_blocking=True)))[0])
    elif job.first_frame:
        rows.append(vae.encode(first_frames(images))[0])
    stored = torch.cat(rows, 1).to(STORED_DTYPES[job.dtype])
    return stored.view(-1, job.copies, *stored.shape[1:])


def with_copies(job: EncodeJob, images: Shaped[Tensor, "b *size"]) -> Shaped[Tensor, "bk *size"]:
    """Pictures, or masks, each followed by its mirror image with --flip true."""
    copies = [images, images.flip(-1)] if job.flip else [images]
    return torch.stack(copies, 1).flatten(0, 1)


def first_frames(clips: UInt8[Tensor, "b 3 f h w"]) -> Float[Tensor, "b 3 f h w"]:
    """Clips with grey frames in place of all but the first."""
    given = torch.full(clips.shape, GREY, device=clips.device)
    given[:, :, 0] = clips[:, :, 0]
    return given


def add(job: EncodeJob, chunk: EncodedChunk, batch: PictureBatch, stored: Sequence[Tensor]) -> None:
    """Add a batch to its chunk, without pictures whose latents or features are not finite."""
    dropped = list(batch.dropped)
    if stored:
        finite = torch.stack([rows.isfinite().flatten(1).all(1) for rows in stored])
        kept = finite.all(0)
        for rows, found in zip(stored, (chunk.latents, chunk.features), strict=False):
            found.append(rows[kept])
        if batch.masks is not None:
            chunk.masks.append(batch.masks[kept])
        whys = (
            f"its latent is not finite in {job.dtype}",
            "its features are not finite in float16",
        )
        pairs = zip(batch.rows, batch.digests, finite.T.tolist(), strict=True)
        for row, sha, are_finite in pairs:
            if all(are_finite):
                chunk.rows.append(row)
                chunk.digests.append(sha)
            else:
                dropped.append((row, whys[are_finite.index(False)]))
    chunk.dropped += sorted(dropped)
    chunk.num_converted += batch.num_converted


def write(job: EncodeJob, digest: str, output: Path, chunk: EncodedChunk) -> None:
    """Write a chunk's shard and its record."""
    (channels, *size), beside = job.shape_of(chunk.number), job.reference_channels
    every = chunk.latents or [torch.empty(0, job.copies, channels + beside, *size)]
    rows = torch.cat(every).flatten(0, 1)
    latents, references = rows[:, :channels].contiguous(), rows[:, channels:].contiguous()
    extra: dict[str, Any] = sums(job, latents) | {
        PICTURES: hashlib.sha256(b"".join(chunk.digests)).hexdigest()
    }
    more = {"reference": references} if beside else {}
    if chunk.masks:
        more["mask"] = with_copies(job, torch.cat(chunk.masks))
        extra[MASKS] = [int(more["mask"].sum(dtype=torch.int64)), more["mask"].numel()]
    if chunk.num_converted:
        extra[CONVERTED] = chunk.num_converted
    if chunk.features:
        more[FEATURES] = torch.cat(chunk.features).flatten(0, 1)
    write_chunk(job, digest, output, chunk.number, chunk.rows, latents, chunk.dropped, extra, more)


def sums(job: EncodeJob, rows: Shaped[Tensor, "n c *size"]) -> dict[str, list[float]]:
    """Sum and sum of squares of each channel of drawn latents, in fp64.

    A drawn latent is mean + std * noise, so its expected square is mean^2 + std^2.
    """
    # numpy: its sums do not depend on the number of threads.
    total, squares = np.zeros(job.channels), np.zeros(job.channels)
    others = (0, *range(2, rows.ndim))
    frames = rows.shape[2] if rows.ndim == 5 else 1
    for part in torch.split(rows, max(1, 1024 // frames)):
        values = part.double().numpy()
        per_channel = np.square(values).sum(others)
        total += values[:, : job.channels].sum(others)
        squares += per_channel.reshape(-1, job.channels).sum(0)
    return {"sum": total.tolist(), "squares": squares.tolist()}


def moments(job: EncodeJob, records: Sequence[ChunkRecord]) -> tuple[list[float], list[float]]:
    """Mean and std of each channel over the dataset, summed in the job's order."""
    count = sum(
        record.count * math.prod(job.shape_of(chunk)[1:]) for chunk, record in enumerate(records)
    )
    total, squares = np.zeros(job.channels), np.zeros(job.channels)
    for record in records:
        if record.count:
            total += np.array(record.extra["sum"])
            squares += np.array(record.extra["squares"])
    mean = total / count
    std = np.sqrt(np.maximum(squares / count - np.square(mean), 0))
    return mean.tolist(), std.tolist()


def finish(job: EncodeJob, output: Path) -> tuple[Drops, list[float], list[float]]:
    """Write captions, reports and the manifest, which makes the output whole.

    Returns (dropped pictures, mean of each channel, std of each channel).
    """
    digest = job.digest()
    records = pack.all_finished(job, output, digest)
    mean, std = moments(job, records)
    more: dict[str, Any] = {}
    if job.units == "measured":
        if not all(std):
            raise UserError(
                f"[data encode] units=measured: channel {std.index(0)} of all latents is constant, "
                "so it has no scale. Choose --units vae."
            )
        more = {"scale": [1 / value for value in std], "shift": mean}
    if job.has_masks:
        more["mask"] = {"mean": mean_of_masks(records)}
    more["pictures_digest"] = digest_of([r.extra[PICTURES] for r in records if r.count])
    if job.pictures.texts:
        data = b"".join(captions(job, records))
        with writing(output / pack.CAPTIONS, job.command):
            write_whole(output / pack.CAPTIONS, data)
        more["captions"] = {"file": pack.CAPTIONS, "sha256": hashlib.sha256(data).hexdigest()}
    if job.survey is not None:
        with writing(output / pack.PICTURES, job.command):
            write_whole(output / pack.PICTURES, b"".join(job.report_lines(records)))
    with writing(output / MANIFEST, job.command):
        pack.write_all(job, output, digest, records, more)
    return [drop for record in records for drop in record.dropped], mean, std


def mean_of_masks(records: Sequence[ChunkRecord]) -> float:
    """The mean of all masks, 0 to 255. Raises UserError if they are black."""
    total, count = (sum(r.extra[MASKS][at] for r in records if r.count) for at in (0, 1))
    if not total:
        raise UserError(
            "[data encode] all masks are black, so no token would have a loss. White counts in "
            "full: exchange black and white."
        )
    return float(total / count)


def captions(job: EncodeJob, records: Sequence[ChunkRecord]) -> Iterator[bytes]:
    """A line of JSON for each kept picture: its first row, file name and caption."""
    row = 0
    for number, record in enumerate(records):
        lost = {picture for picture, _ in record.dropped}
        for picture in job.rows(number):
            if picture in lost:
                continue
            values = {
                "row": row,
                "file_name": job.names[picture],
                "text": job.pictures.texts[picture],
            }
            yield (json.dumps(values, ensure_ascii=False) + "\n").encode("utf-8", "replace")
            row += job.copies
