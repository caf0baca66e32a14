"""Latent shards: safetensors files with a manifest, for random access.

A dataset is a folder with `manifest.json` and shards. A shard holds `latent`, [n, c, h, w] of
pictures or [n, c, f, h, w] of clips (float16, float32 or uint8), and `label` [n] (int64). The
manifest holds shape, dtype, scale, shift, source and count, and the count, bytes and SHA-256 of
each shard. In its third version shards have several shapes: the rows of each shape, one after
another, are a bucket. A shard may hold `reference`, latents [n, k, *size] that a network is given,
`mask` [n, *size] (uint8), weights of the loss, and `features` of its pictures, [n, rows, columns,
dim] (float16). Beside the shards may lie the embeddings of captions (`caption_embeddings`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int64, Shaped, UInt8, UInt16
from safetensors import SafetensorError, safe_open
from safetensors import torch as safetensors
from torch import Tensor

from titan_dit.config.section import UserError, few, show
from titan_dit.data.base import Field, SampleOrder, Source
from titan_dit.data.buckets import BucketOrder
from titan_dit.data.caption_embeddings import CAPTIONS, INDEX, CaptionEmbeddings, texts_of
from titan_dit.data.folders import LatentFolder
from titan_dit.data.latent_facts import (
    FEATURES,
    FEATURES_DTYPE,
    FeatureFacts,
    LatentFacts,
    ReferenceFacts,
    Shape,
    VAEFacts,
    beside_fields,
    clip_of,
    name_of,
)
from titan_dit.data.listing import Listing, layout_of, list_folder
from titan_dit.data.manifest import (
    BUCKETS_FORMAT,
    FORMAT,
    MANIFEST,
    SHARD_KEYS,
    agreed,
    check_manifest,
    damaged,
    digest_of,
    file_digest,
    read_manifest,
)
from titan_dit.data.sections import Latents
from titan_dit.data.shards import RowFile, ShardRows, bytes_of, read_header
from titan_dit.system.files import write_json, write_whole
from titan_dit.system.progress import ProgressLine, count

BESIDE = "reference", "mask", FEATURES
"""Keys of a manifest that say that its shards hold a tensor of this name."""
MAX_MAPS = 65_530
"""Linux's default of vm.max_map_count."""
STORED_DTYPES = {"float16": torch.float16, "float32": torch.float32, "uint8": torch.uint8}


def survey(section: Latents) -> Listing | None:
    """List the files of a folder, with their labels; of shards, check all labels.

    With `verify`, `open_surveyed` checks the labels, after the SHA-256: a wrong label may be a
    damaged file. Raises UserError for [data] buckets of a folder of files.
    """
    path = Path(section.path)
    if layout_of(path) != "shards":
        if section.buckets is not None:
            raise UserError(
                f"[data] buckets={show(section.buckets)}: {path} holds no shards, whose buckets "
                "have names. Leave buckets out, or make shards by `data encode --buckets`."
            )
        return list_folder(path)
    if not section.verify:
        LatentShards(path, buckets=section.buckets).check_labels()
    return None


def open_surveyed(section: Latents, survey: Listing | None) -> LatentShards | LatentFolder:
    """Open the listed files, or the shards; `verify` reads and checks all data."""
    path = Path(section.path)
    if survey is not None:
        return LatentFolder(path, section.scale, section.shift, section.verify, survey)
    source = LatentShards(path, section.verify, section.buckets)
    if section.verify:
        source.check_labels()
    agreed("scale", section.scale, source.facts.scale, 1.0, path)
    agreed("shift", section.shift, source.facts.shift, 0.0, path)
    return source


class LatentShard(NamedTuple):
    """One file of a dataset."""

    latents: RowFile
    labels: Int64[Tensor, " n"]
    """A view of the mapped file, read on access."""
    beside: dict[str, RowFile]
    """Further tensors of the same file by name."""
    masks: tuple[int, int]
    """Sum and number of the values of its masks; (0, 0) without masks, or if it is not verified."""


@dataclass(frozen=True)
class LatentBucket:
    """Neighbouring rows of one shape."""

    shape: Shape
    first: int
    """Its first row."""
    count: int
    left_out_before: int = 0
    """Rows before its own in the folder that are left out."""

    @property
    def name(self) -> str:
        """Name for messages, see `name_of`."""
        return name_of(self.shape)

    @property
    def rows(self) -> range:
        """Its rows in the dataset."""
        return range(self.first, self.first + self.count)


class LatentShards(Source):
    """Random access to a folder of shards, or to some of its buckets, by their names.

    The rows of other buckets have no numbers, and their shards are not opened.

    Labels are memory-mapped, latents are read row by row. Both stay in the page cache, which all
    processes of a node share; a rank's own memory does not grow with the rows.
    """

    def __init__(
        self, path: Path, verify: bool = False, buckets: Sequence[str] | None = None
    ) -> None:
        """Raise UserError for a missing or damaged file, and for an unknown bucket."""
        self.path, self._chosen = path, buckets
        self.manifest = manifest = read_manifest(path, buckets)
        check_maps(path, len(manifest["shards"]))
        size = sum(entry["bytes"] for entry in manifest["shards"])
        progress = ProgressLine(size, "B", what="verified", form=count)
        self.shards = []
        for entry in manifest["shards"]:
            self.shards.append(self._open_shard(entry, manifest, verify))
            if verify:
                progress.add(entry["bytes"])
        progress.end()
        if verify:
            self._check_mask_mean()
        self.counts = np.array([len(shard.labels) for shard in self.shards])
        self.ends = self.counts.cumsum()
        self.copies = manifest.get("copies", 1)
        self.dtype = STORED_DTYPES[manifest["dtype"]]
        self._numpy_dtype = np.dtype(manifest["dtype"])
        # An element of a memoryview is read several times faster than that of a tensor.
        self._labels = [shard.labels.numpy().data for shard in self.shards]
        firsts = np.cumsum([0, *(bucket["count"] for bucket in manifest["buckets"])]).tolist()
        self.buckets = tuple(
            LatentBucket(bucket["shape"], first, bucket["count"], bucket["left_out_before"])
            for bucket, first in zip(manifest["buckets"], firsts, strict=False)
        )
        """The rows of each shape; a single one if all have the same."""
        self.keeps_groups = len(self.buckets) > 1
        self._bucket = np.array([entry["bucket"] for entry in manifest["shards"]])
        sizes = [math.prod(bucket.shape) * self.dtype.itemsize for bucket in self.buckets]
        row_bytes = [sizes[entry["bucket"]] for entry in manifest["shards"]]
        self._latents = ShardRows([shard.latents for shard in self.shards], row_bytes)
        self._beside = self._rows_beside()
        self._features: ShardRows | None = None
        shapes = tuple(bucket.shape for bucket in self.buckets)
        scale, shift = manifest["scale"], manifest["shift"]
        units = [] if (scale, shift) == (1.0, 0.0) else [f"scale={scale} shift={shift}"]
        vae, text = manifest.get("vae"), manifest.get("text")
        reference, mask = manifest.get("reference"), manifest.get("mask")
        self._text: CaptionEmbeddings | None = None
        texts = list[str]()
        if text is not None:
            stored = int(self.ends[-1]) + sum(manifest["left_out"].values())
            num_pictures = stored // self.copies
            self._text = CaptionEmbeddings(path, text, num_pictures, verify)
            texts = [entry["sha256"] for entry in (*text["files"], text["index"])]
        self.facts: LatentFacts = LatentFacts(
            shape=max(shapes, key=math.prod),
            bucket_shapes=shapes if self.keeps_groups else (),
            bucket_counts=tuple(b.count for b in self.buckets) if self.keeps_groups else (),
            count=int(self.ends[-1]),
            num_classes=manifest["num_classes"],
            class_names=manifest["classes"] or (),
            scale=scale,
            shift=shift,
            value_range=manifest["value_range"],
            vae=vae and vae_facts(vae),
            vae_source=vae["source"] if vae else "",
            posterior=manifest.get("posterior") or "",
            fps=manifest["fps"],
            text=self._text.facts if self._text else None,
            text_digest=digest_of(texts) if texts else "",
            text_source=text["source"] if text else "",
            reference=reference and reference_facts(reference, vae),
            mask_mean=mask["mean"] if mask else None,
            digest=digest_of([entry["sha256"] for entry in manifest["shards"]] + units),
        )
        self.fields = self.facts.fields(self.dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the path only; a spawned process opens the files itself."""
        as_ids = self.facts.text is not None and self.facts.text.is_online
        has_features = self._features is not None
        return reopened, (self.path, self._chosen, as_ids, self.facts.has_clips, has_features)

    def as_ids(self) -> LatentShards:
        """See `Source.as_ids`."""
        if self._text is None:
            return super().as_ids()
        text = self._text.as_ids()
        return self._with(replace(self.facts, text=text.facts), _text=text)

    def with_features(self) -> LatentShards:
        """See `Source.with_features`."""
        if FEATURES not in self.shards[0].beside:
            return super().with_features()
        files = [shard.beside[FEATURES] for shard in self.shards]
        entry = self.manifest["features"]
        facts = FeatureFacts(
            **{key: entry[key] for key in ("name", "digest", "dim")}, grid=tuple(entry["grid"])
        )
        size = facts.num_tokens * facts.dim * np.dtype(FEATURES_DTYPE).itemsize
        rows = ShardRows(files, size, beside=self._latents)
        return self._with(replace(self.facts, features=facts), _features=rows)

    def as_clips(self) -> LatentShards:
        """See `Source.as_clips`: the bytes of a row are the same."""
        buckets = tuple(replace(bucket, shape=clip_of(bucket.shape)) for bucket in self.buckets)
        return self._with(self.facts.as_clips(), buckets=buckets)

    def _with(self, facts: LatentFacts, **changed: Any) -> LatentShards:
        """The same files, read otherwise."""
        # Not copy.copy, which would open the files again, by `__reduce__`.
        found = type(self).__new__(type(self))
        found.__dict__.update(vars(self) | changed)
        found.facts, found.fields = facts, facts.fields(self.dtype)
        return found

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Read one sample; rows are numbered across the shards in manifest order."""
        return {name: value[0] for name, value in self.read([index]).items()}

    @property
    def bucket_rows(self) -> Sequence[range]:
        """See `Source.bucket_rows`."""
        return [bucket.rows for bucket in self.buckets]

    @property
    def bucket_names(self) -> Sequence[str]:
        """See `Source.bucket_names`."""
        return [bucket.name for bucket in self.buckets]

    def bucket_fields(self, bucket: int) -> dict[str, Field]:
        """See `Source.bucket_fields`."""
        return beside_fields(self.fields, self.buckets[bucket].shape)

    def _check_mask_mean(self) -> None:
        """Raise UserError unless the manifest has the mean of all masks, which were summed."""
        if not self.manifest.get("mask") or self.manifest["left_out"]:
            return  # The mean is also that of buckets that are not opened.
        total, num = (sum(shard.masks[at] for shard in self.shards) for at in (0, 1))
        mean = self.manifest["mask"]["mean"]
        if not math.isclose(mean, total / num, rel_tol=1e-6):
            raise damaged(
                self.path / MANIFEST, f"mask mean={mean}, but the masks have {total / num:.8g}"
            )

    def _rows_beside(self) -> dict[str, ShardRows]:
        """The rows of further tensors of the shards, by name; features are read when asked for."""
        found = {}
        for name in set(self.shards[0].beside) - {FEATURES}:
            itemsize = self.dtype.itemsize if name == "reference" else 1
            shapes = [beside_shape(name, self.manifest, bucket.shape) for bucket in self.buckets]
            row_bytes = [math.prod(shapes[number]) * itemsize for number in self._bucket.tolist()]
            files = [shard.beside[name] for shard in self.shards]
            found[name] = ShardRows(files, row_bytes, beside=self._latents)
        return found

    @property
    def labels(self) -> Int64[Tensor, " n"]:
        """The labels of all rows, copied into memory."""
        return torch.cat([shard.labels for shard in self.shards])

    def groups(self) -> Int64[Tensor, " n"]:
        """The label of every row; its bucket's number if `keeps_groups`."""
        if self.keeps_groups:
            return torch.cat(list(self.group_parts()))
        return self.labels

    def group_parts(self) -> Iterator[Int64[Tensor, " n"]]:
        """Yield the groups of each shard's rows."""
        if not self.keeps_groups:
            yield from self.label_parts()
            return
        for entry in self.manifest["shards"]:
            yield torch.full((entry["count"],), entry["bucket"])

    def label_parts(self) -> Iterator[Int64[Tensor, " n"]]:
        """Yield the labels of each shard, from a mapping that is closed afterwards.

        Closing it takes the pages out of the process's memory.
        """
        for entry in self.manifest["shards"]:
            with safe_open(self.path / entry["file"], framework="pt") as file:
                yield file.get_tensor("label")

    def order(
        self,
        seed: int,
        held_out: tuple[int, ...],
        data_order: str,
        batch_sizes: Sequence[int] = (),
    ) -> SampleOrder:
        """The order of training; of several buckets, steps of one bucket each."""
        if not self.keeps_groups:
            return super().order(seed, held_out, data_order, batch_sizes)
        names = [bucket.name for bucket in self.buckets]
        sizes = [bucket.count for bucket in self.buckets]
        return BucketOrder.of(seed, names, sizes, batch_sizes, held_out)

    def check_labels(self) -> None:
        """Raise UserError for the first label outside the classes."""
        shards, num_classes = self.manifest["shards"], self.manifest["num_classes"]
        for entry, labels in zip(shards, self.label_parts(), strict=True):
            check_labels(labels, num_classes, self.path / entry["file"])

    def read(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """Read rows of any shards into new tensors; a row's number draws one of several captions.

        Raises UserError if a row cannot be read, and ValueError for rows of several buckets, whose
        shapes differ.
        """
        return self.read_numbered(rows, rows)

    def read_numbered(self, rows: Sequence[int], numbers: Sequence[int]) -> dict[str, Tensor]:
        """`read` for samples of these numbers; each sample draws one of its row's captions."""
        return self.read_padded(rows, numbers)

    def in_text_groups(self, multiple: int) -> Source:
        """See `Source.in_text_groups`; of a set without captions the set itself."""
        from titan_dit.data.text_groups import TextGroups

        return TextGroups(self, multiple) if self._text else self

    def text_lengths(self) -> UInt16[np.ndarray, " n"]:
        """Tokens of the longest caption of every row. Raises UserError for a damaged index."""
        assert self._text is not None
        lengths: UInt16[np.ndarray, " n"] = np.repeat(self._text.longest(), self.copies)
        if self.manifest["left_out"]:
            own = [lengths[b.first + b.left_out_before :][: b.count] for b in self.buckets]
            lengths = np.concatenate(own)
        return lengths

    def pictures(self, rows: Sequence[int]) -> Int64[np.ndarray, " b"]:
        """The picture of each row, numbered as in the folder."""
        return self.rows_there(rows) // self.copies

    def rows_there(self, rows: Sequence[int]) -> Int64[np.ndarray, " b"]:
        """Rows by their number in the folder, where left-out ones are numbered, too."""
        at = np.asarray(rows, dtype=np.int64)
        ends = np.array([bucket.rows.stop for bucket in self.buckets])
        left_out = np.array([bucket.left_out_before for bucket in self.buckets])
        found: Int64[np.ndarray, " b"] = at + left_out[np.searchsorted(ends, at, side="right")]
        return found

    def row_name(self, row: int) -> str:
        """See `Source.row_name`."""
        return f"row {self.rows_there([row])[0]}"

    def lines(self, order: SampleOrder) -> Iterator[str]:
        """See `Source.lines`: what [data] buckets leaves out."""
        if left_out := self.manifest["left_out"]:
            each = [f"{count:,} of {name}" for name, count in left_out.items()]
            total = sum(left_out.values())
            yield f"left out by [data] buckets: {total:,} samples ({few(each, 50)})"

    def read_padded(
        self, rows: Sequence[int], numbers: Sequence[int], text_tokens: int | None = None
    ) -> dict[str, Tensor]:
        """`read_numbered` with captions of `text_tokens` tokens, which hold them; None: the most.

        Raises UserError for a caption that has more.
        """
        at = self.checked_rows(rows)
        shard = np.searchsorted(self.ends, at, side="right")
        within = at - (self.ends[shard] - self.counts[shard])
        buckets = set(self._bucket[shard].tolist())
        if len(buckets) > 1:
            raise ValueError(f"rows of {len(buckets)} buckets have no common shape")
        shape = self.buckets[buckets.pop() if buckets else 0].shape
        # numpy takes large arrays from huge pages: a page fault while the kernel copies costs most.
        latents = np.empty((len(at), *shape), self._numpy_dtype)
        self._latents.read(shard, within, bytes_of(latents))
        pairs = zip(shard.tolist(), within.tolist(), strict=True)
        labels = np.array([self._labels[number][row] for number, row in pairs], dtype=np.int64)
        found = {"latent": torch.from_numpy(latents), "label": torch.from_numpy(labels)}
        for name, stored in self._beside.items():
            dtype = self._numpy_dtype if name == "reference" else np.dtype(np.uint8)
            values = np.empty((len(at), *beside_shape(name, self.manifest, shape)), dtype)
            stored.read(shard, within, bytes_of(values))
            found[name] = torch.from_numpy(values)
        if self._features and (facts := self.facts.features):
            features = np.empty((len(at), facts.num_tokens, facts.dim), FEATURES_DTYPE)
            self._features.read(shard, within, bytes_of(features))
            found[FEATURES] = torch.from_numpy(features)
        if self._text:
            found |= self._text.read(self.pictures(rows), numbers, text_tokens)
        return found

    def read_fields(self, names: Sequence[str], rows: Sequence[int]) -> dict[str, Tensor]:
        """See `Source.read_fields`; of the embeddings of captions alone, no latents are read."""
        if self._text is None or not set(names) <= {"text", "text_ids", "text_length"}:
            return super().read_fields(names, rows)
        found = self._text.read(self.pictures(rows), rows)
        return {name: found[name] for name in names}

    def captions(self, rows: Sequence[int]) -> list[str]:
        """See `Source.captions`. Raises UserError for a damaged captions.jsonl."""
        file = self.path / CAPTIONS
        if self._text is None or not file.is_file():
            return []
        pictures = self.pictures(rows)
        choices = self._text.choices(pictures, rows).tolist()
        wanted, found = set(pictures.tolist()), dict[int, list[str]]()
        with file.open("rb") as lines:
            for number, line in enumerate(islice(lines, max(wanted, default=-1) + 1)):
                if number in wanted:
                    found[number] = texts_of(line, f"[data] {file}, line {number + 1}")
        try:
            return [found[n][k] for n, k in zip(pictures.tolist(), choices, strict=True)]
        except (KeyError, IndexError):
            raise UserError(
                f"[data] {file}: holds other captions than {self.path / INDEX}. Restore it."
            ) from None

    def _open_shard(
        self, entry: dict[str, Any], manifest: dict[str, Any], verify: bool
    ) -> LatentShard:
        """Check a shard's size, shapes and dtypes, and map it; with `verify`, check its SHA-256."""
        path = self.path / entry["file"]
        remedy = "Restore the file, or pack the dataset again."
        if not path.is_file():
            raise UserError(f"[data] {path}: the shard is missing. {remedy}")
        status = path.stat()
        if status.st_size != entry["bytes"]:
            raise UserError(
                f"[data] {path}: {status.st_size:,} bytes, but the manifest says "
                f"{entry['bytes']:,}. {remedy}"
            )
        if verify and file_digest(path) != entry["sha256"]:
            raise UserError(f"[data] {path}: its SHA-256 differs from the manifest's. {remedy}")
        beside = [name for name in BESIDE if manifest.get(name)]
        try:
            with safe_open(path, framework="pt") as file:
                # Views of the mapped file: only its header is read.
                latents, labels = file.get_tensor("latent"), file.get_tensor("label")
                unnamed = sorted({*BESIDE} & {*file.keys()} - {*beside})
                others = {name: file.get_tensor(name) for name in beside}
        except SafetensorError as error:
            raise UserError(f"[data] {path}: not a readable shard ({error}). {remedy}") from None
        if unnamed:
            what = f"{unnamed[0]} missing, but {entry['file']} holds a tensor of this name"
            raise damaged(self.path / MANIFEST, what)
        shape = manifest["buckets"][entry["bucket"]]["shape"]
        stored = STORED_DTYPES[manifest["dtype"]]
        wanted = {"latent": (stored, (entry["count"], *shape))}
        for name in beside:
            dtype = {"reference": stored, FEATURES: torch.float16}.get(name, torch.uint8)
            wanted[name] = dtype, (entry["count"], *beside_shape(name, manifest, shape))
        for name, tensor in {"latent": latents, **others}.items():
            if (tensor.dtype, tuple(tensor.shape)) != wanted[name]:
                what = "" if name == "latent" else f"{name} of "
                kind = str(wanted[name][0]).removeprefix("torch.")
                raise UserError(
                    f"[data] {path}: holds {what}{tensor.dtype} {list(tensor.shape)}, but the "
                    f"manifest says {kind} {list(wanted[name][1])}. {remedy}"
                )
        check_shape(labels, entry["count"], path)
        with path.open("rb") as opened:
            tensors = read_header(opened.fileno())
        starts = {tensor.name: tensor.start for tensor in tensors}
        rows = {
            name: RowFile(path, starts[name], status.st_size, status.st_mtime_ns, tensors)
            for name in wanted
        }
        masks = sum_and_size(others.get("mask") if verify else None)
        return LatentShard(rows.pop("latent"), labels, rows, masks)


def sum_and_size(masks: UInt8[Tensor, "n *size"] | None) -> tuple[int, int]:
    """Sum and number of the values of masks; (0, 0) without any."""
    return (0, 0) if masks is None else (int(masks.sum(dtype=torch.int64)), masks.numel())


def beside_shape(name: str, manifest: dict[str, Any], shape: Sequence[int]) -> tuple[int, ...]:
    """Shape of a row of a tensor of `BESIDE`, beside a latent of `shape`."""
    if name == FEATURES:
        return (*manifest[FEATURES]["grid"], manifest[FEATURES]["dim"])
    channels = [manifest["reference"]["channels"]] if name == "reference" else []
    return (*channels, *shape[1:])


def check_maps(path: Path, num_shards: int) -> None:
    """Raise UserError for more shards than the kernel lets a process map."""
    file = Path("/proc/sys/vm/max_map_count")
    most = int(file.read_text()) if file.is_file() else MAX_MAPS
    # torch and its libraries take some thousand.
    if num_shards > most - 5_000:
        raise UserError(
            f"[data] path={path}: {num_shards:,} shards need as many memory maps, but "
            f"vm.max_map_count={most}. Pack larger shards (`data pack --shard-size`), or raise "
            f"the limit: sysctl -w vm.max_map_count={2 * num_shards + 10_000}"
        )


def reopened(
    path: Path,
    buckets: Sequence[str] | None,
    as_ids: bool,
    as_clips: bool,
    with_features: bool,
) -> LatentShards:
    """The shards of a folder, their captions perhaps as token ids, pictures perhaps as clips."""
    found = LatentShards(path, buckets=buckets)
    found = found.with_features() if with_features else found
    found = found.as_ids() if as_ids else found
    return found.as_clips() if as_clips else found


def vae_facts(entry: dict[str, Any]) -> VAEFacts:
    """The autoencoder in a manifest."""
    return VAEFacts(
        kind=entry["class"],
        digest=entry["digest"],
        factor=entry["factor"],
        frames_factor=entry["frames_factor"] or 1,
    )


def reference_facts(entry: dict[str, Any], vae: dict[str, Any] | None) -> ReferenceFacts:
    """The references in a manifest; `vae`: the autoencoder there, which groups frames."""
    is_first = entry["kind"] == "first_frame"
    frames = ((vae or {}).get("frames_factor") or 1) if is_first else 0
    return ReferenceFacts(kind=entry["kind"], channels=entry["channels"], frame_channels=frames)


def check_shape(labels: Tensor, count: int, path: Path) -> None:
    """Raise UserError for labels that are not int64 [count]."""
    if labels.dtype != torch.int64 or tuple(labels.shape) != (count,):
        raise UserError(
            f"[data] {path}: label is {labels.dtype} {list(labels.shape)}, not int64 [{count}]. "
            "Give one class per latent."
        )


def check_labels(labels: Tensor, num_classes: int, path: Path) -> None:
    """Raise UserError for labels outside [0, num_classes); names the first bad row."""
    lowest, highest = torch.aminmax(labels)
    if lowest < 0 or highest >= num_classes:
        row = int(((labels < 0) | (labels >= num_classes)).nonzero()[0])
        raise UserError(
            f"[data] {path}: row {row} has label={int(labels[row])}, outside 0 to "
            f"{num_classes - 1} (num_classes={num_classes} in {MANIFEST}). Fix the label, or "
            f"raise num_classes there and in [model]."
        )


def write_shards(
    path: Path,
    latents: Shaped[Tensor, "n c *size"],
    labels: Shaped[Tensor, "..."],
    *,
    num_classes: int,
    source: str,
    scale: float = 1.0,
    shift: float = 0.0,
    value_range: tuple[float, float] | None = None,
    shard_size: int = 1 << 16,
    about: dict[str, str] | None = None,
) -> None:
    """Write a dataset; the manifest is written last, so an unfinished dataset cannot be opened.

    `labels` are int64 [n], from 0 to num_classes - 1. Raises UserError for invalid data, and never
    overwrites a dataset.
    """
    shards = write_parts(path, [(latents, labels)], num_classes, shard_size)
    manifest = {
        "format": FORMAT,
        "source": source,
        **(about or {}),
        "shape": list(latents.shape[1:]),
        "dtype": str(latents.dtype).removeprefix("torch."),
        "count": len(latents),
        "num_classes": num_classes,
        "scale": scale,
        "shift": shift,
        "value_range": value_range,
        "shards": [{key: shard[key] for key in SHARD_KEYS} for shard in shards],
    }
    check_manifest(manifest, path / MANIFEST)
    write_json(path / MANIFEST, manifest)


def write_buckets(
    path: Path,
    buckets: Sequence[tuple[Tensor, Tensor]],
    *,
    num_classes: int,
    source: str,
    scale: float = 1.0,
    shift: float = 0.0,
    value_range: tuple[float, float] | None = None,
    shard_size: int = 1 << 16,
    about: dict[str, str] | None = None,
) -> None:
    """Write a dataset of several shapes, as `write_shards`.

    `buckets`: latents, [n, c, h, w] or [n, c, f, h, w], and labels [n] of each shape.
    """
    shards = write_parts(path, buckets, num_classes, shard_size)
    manifest = {
        "format": BUCKETS_FORMAT,
        "source": source,
        **(about or {}),
        "buckets": [
            {"shape": list(latents.shape[1:]), "count": len(latents)} for latents, _ in buckets
        ],
        "dtype": str(buckets[0][0].dtype).removeprefix("torch."),
        "count": sum(len(latents) for latents, _ in buckets),
        "num_classes": num_classes,
        "scale": scale,
        "shift": shift,
        "value_range": value_range,
        "shards": shards,
    }
    check_manifest(manifest, path / MANIFEST)
    write_json(path / MANIFEST, manifest)


def write_parts(
    path: Path, buckets: Sequence[tuple[Tensor, Tensor]], num_classes: int, shard_size: int
) -> list[dict[str, Any]]:
    """Write the shards of each bucket; their entries in the manifest. Raises UserError."""
    if (path / MANIFEST).exists():
        raise UserError(
            f"[data] {path} already holds a dataset ({MANIFEST}). Delete the folder, or write to "
            "another one."
        )
    for latents, labels in buckets:
        check_rows(path, latents, labels, num_classes)
    if len({latents.dtype for latents, _ in buckets}) > 1:
        raise UserError(f"[data] {path}: the latents of its buckets differ in dtype. Give one.")
    path.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Any]] = []
    for bucket, (latents, labels) in enumerate(buckets):
        for first in range(0, len(latents), shard_size):
            rows = slice(first, first + shard_size)
            file = path / f"{path.name}-{len(shards):05d}.safetensors"
            tensors = {"latent": latents[rows].contiguous(), "label": labels[rows].contiguous()}
            data = safetensors.save(tensors)
            write_whole(file, data)
            shards.append(
                {
                    "file": file.name,
                    "count": len(labels[rows]),
                    "bytes": len(data),
                    "sha256": hashlib.sha256(data).hexdigest(),
                    "bucket": bucket,
                }
            )
    return shards


def check_rows(path: Path, latents: Tensor, labels: Tensor, num_classes: int) -> None:
    """Raise UserError for latents and labels that cannot be written."""
    if not len(latents):
        raise UserError(f"[data] {path}: latents {list(latents.shape)} hold no sample. Give some.")
    check_shape(labels, len(latents), path)
    check_labels(labels, num_classes, path)
    if latents.dtype not in STORED_DTYPES.values():
        known = ", ".join(STORED_DTYPES)
        raise UserError(f"[data] {path}: {latents.dtype} is not one of {known}. Convert them.")
    if not (finite := latents.flatten(1).isfinite().all(1)).all():
        row = int((~finite).nonzero()[0])
        raise UserError(f"[data] {path}: row {row} holds NaN or infinity. Remove such rows.")
