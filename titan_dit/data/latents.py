"""Latent shards: safetensors files with a manifest, memory-mapped, read in any order.

A dataset is a folder with `manifest.json` and shards. A shard holds `latent` [n, c, h, w] (float16,
float32 or uint8) and `label` [n] (int64). The manifest gives shape, dtype, scale and shift, the
source, the count, and for each shard its count, bytes and SHA-256.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Int64, Shaped
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from titan_dit.data.base import DataConfig, DataFacts, Sample
from titan_dit.section import Count, Finite, UserError, conform

FORMAT = "titan_dit.latents/1"
MANIFEST = "manifest.json"
DTYPES = {"float16": torch.float16, "float32": torch.float32, "uint8": torch.uint8}
MANIFEST_KEYS = {
    "source": str,
    "shape": tuple[Count, ...],
    "dtype": Literal["float16", "float32", "uint8"],
    "count": Count,
    "num_classes": Count,
    "scale": Finite,
    "shift": Finite,
    "value_range": tuple[Finite, ...] | None,
}
SHARD_KEYS = {"file": str, "count": Count, "bytes": Count, "sha256": str}


@dataclass(frozen=True, kw_only=True)
class Latents(DataConfig):
    """Latents on disk, packed into shards."""

    name = "latents"

    path: str
    """Folder that holds manifest.json."""
    verify: bool = False
    """Read every shard at the start and compare its SHA-256 with the manifest's."""

    def open(self) -> LatentShards:
        """Map the shards."""
        return LatentShards(Path(self.path), verify=self.verify)


@dataclass(frozen=True, kw_only=True)
class Digits(DataConfig):
    """The 1,797 handwritten digits of the UCI repository, 8x8 in [-1, 1]; comes with titan_dit."""

    name = "digits"

    def open(self) -> LatentShards:
        """Map the one shard."""
        return LatentShards(Path(__file__).parent / "digits", verify=True)


class LatentShards:
    """The samples of a folder of shards.

    Opening maps the files and reads the labels; latents are read when they are asked for.
    """

    def __init__(self, path: Path, verify: bool = False) -> None:
        self.path = path
        manifest = read_manifest(path)
        self.shards = [self._open_shard(entry, manifest, verify) for entry in manifest["shards"]]
        self.ends = list(itertools.accumulate(len(labels) for _, labels in self.shards))
        self.facts = DataFacts(
            shape=manifest["shape"],
            count=self.ends[-1],
            num_classes=manifest["num_classes"],
            scale=manifest["scale"],
            shift=manifest["shift"],
            value_range=manifest["value_range"],
            digest=digest_of([entry["sha256"] for entry in manifest["shards"]]),
        )

    def __len__(self) -> int:
        """Number of samples over all shards."""
        return self.facts.count

    def __getitem__(self, index: int) -> Sample:
        """Read one sample; shards are numbered on in the manifest's order."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        shard = bisect.bisect_right(self.ends, index)
        latents, labels = self.shards[shard]
        row = index - (self.ends[shard - 1] if shard else 0)
        # Always a copy: the mapped file must not change under its next reader.
        latent = latents[row].to(torch.float32, copy=True)
        if (self.facts.scale, self.facts.shift) != (1.0, 0.0):
            latent = (latent - self.facts.shift) * self.facts.scale
        return Sample(latent, int(labels[row]))

    def _open_shard(
        self, entry: dict[str, Any], manifest: dict[str, Any], verify: bool
    ) -> tuple[Shaped[Tensor, "n c h w"], Int64[Tensor, " n"]]:
        """Map a shard and check all that can be checked without reading its latents."""
        path = self.path / entry["file"]
        remedy = "Restore the file, or pack the dataset again."
        if not path.is_file():
            raise UserError(f"[data] {path}: the shard is missing. {remedy}")
        if path.stat().st_size != entry["bytes"]:
            raise UserError(
                f"[data] {path}: {path.stat().st_size:,} bytes where the manifest says "
                f"{entry['bytes']:,}. {remedy}"
            )
        if verify and file_digest(path) != entry["sha256"]:
            raise UserError(f"[data] {path}: its SHA-256 is not the manifest's. {remedy}")
        try:
            with safe_open(path, framework="pt") as file:
                # A view of the mapped file: nothing is read before a row is asked for.
                latents, labels = file.get_tensor("latent"), file.get_tensor("label")
        except SafetensorError as error:
            raise UserError(f"[data] {path}: not a readable shard ({error}). {remedy}") from None
        expected = (entry["count"], *manifest["shape"])
        if tuple(latents.shape) != expected or latents.dtype != DTYPES[manifest["dtype"]]:
            raise UserError(
                f"[data] {path}: holds {latents.dtype} {list(latents.shape)} where the manifest "
                f"says {manifest['dtype']} {list(expected)}. {remedy}"
            )
        check_labels(labels, entry["count"], manifest["num_classes"], path)
        return latents, labels


def check_labels(labels: Tensor, count: int, num_classes: int, path: Path) -> None:
    """Every label must be a class; the first that is not is named."""
    if labels.dtype != torch.int64 or tuple(labels.shape) != (count,):
        raise UserError(
            f"[data] {path}: label is {labels.dtype} {list(labels.shape)}, not int64 [{count}]."
        )
    outside = ((labels < 0) | (labels >= num_classes)).nonzero()
    if len(outside):
        row = int(outside[0])
        raise UserError(
            f"[data] {path}: row {row} has label={int(labels[row])}, outside 0 to "
            f"{num_classes - 1} (num_classes={num_classes} in {MANIFEST}). Mend the label, or "
            f"raise num_classes there and in [model]."
        )


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a dataset folder, its keys and simple types checked."""
    file = path / MANIFEST
    if not file.is_file():
        raise UserError(f"[data] path={path}: there is no {MANIFEST}. Give the folder that has it.")
    try:
        manifest = json.loads(file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"[data] {file} is not valid JSON: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise UserError(f'[data] {file}: it lacks "format": "{FORMAT}", so it is no such dataset.')
    manifest = conform_keys(manifest, MANIFEST_KEYS, str(file))
    if not isinstance(manifest.get("shards"), list) or len(manifest["shape"]) != 3:
        raise UserError(f"[data] {file}: shape must be [c, h, w], and shards a list.")
    if manifest["value_range"] is not None and len(manifest["value_range"]) != 2:
        raise UserError(f"[data] {file}: value_range must hold two numbers.")
    if manifest["scale"] == 0:
        raise UserError(f"[data] {file}: scale=0 would make every latent the same.")
    manifest["shards"] = [
        conform_keys(entry, SHARD_KEYS, f"{file} shards[{number}]")
        for number, entry in enumerate(manifest["shards"])
    ]
    counted = sum(entry["count"] for entry in manifest["shards"])
    if counted != manifest["count"] or not counted:
        raise UserError(
            f"[data] {file}: count={manifest['count']}, but its shards hold {counted} samples."
        )
    return manifest


def conform_keys(values: Any, hints: dict[str, Any], where: str) -> dict[str, Any]:
    """Check the types of the keys that are known; the others are kept as they are."""
    if not isinstance(values, dict):
        raise UserError(f"[data] {where} must be a table of {', '.join(hints)}.")
    optional = {"value_range"}
    if missing := [key for key in hints if key not in values and key not in optional]:
        raise UserError(f"[data] {where}: {', '.join(missing)} missing.")
    checked = {k: conform(values.get(k), hint, f"[data] {where}: {k}") for k, hint in hints.items()}
    return values | checked


def write_shards(
    path: Path,
    latents: Shaped[Tensor, "n c h w"],
    labels: Int64[Tensor, " n"],
    *,
    num_classes: int,
    source: str,
    scale: float = 1.0,
    shift: float = 0.0,
    value_range: tuple[float, float] | None = None,
    shard_size: int = 1 << 16,
    about: dict[str, str] | None = None,
) -> None:
    """Write a dataset; the manifest comes last, so that an unfinished one is never opened."""
    if latents.dtype not in DTYPES.values():
        raise UserError(f"[data] {path}: {latents.dtype} is not one of {', '.join(DTYPES)}.")
    path.mkdir(parents=True, exist_ok=True)
    (path / MANIFEST).unlink(missing_ok=True)
    shards = []
    for number, first in enumerate(range(0, len(latents), shard_size)):
        rows = slice(first, first + shard_size)
        file = path / f"{path.name}-{number:05d}.safetensors"
        save_file({"latent": latents[rows].contiguous(), "label": labels[rows].contiguous()}, file)
        file.chmod(0o644)  # safetensors writes 0600, which locks out the rest of the team.
        count, size = len(labels[rows]), file.stat().st_size
        shards.append(
            {"file": file.name, "count": count, "bytes": size, "sha256": file_digest(file)}
        )
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
        "shards": shards,
    }
    (path / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of(parts: Sequence[str]) -> str:
    """One digest of several."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
