"""The keys of the datasets, without torch, so that `--help` is quick."""

from __future__ import annotations

from dataclasses import dataclass

from titan_dit.config.section import FilePath, Finite, Named, NonNegativeInt, PositiveInt


@dataclass(frozen=True, kw_only=True)
class DataKeys(Named):
    """Keys shared by all datasets."""

    section = "data"

    workers: NonNegativeInt = 0
    """Prefetching worker processes per rank; 0 reads in the training process."""


@dataclass(frozen=True, kw_only=True)
class LatentsKeys(DataKeys):
    """Latents on disk: shards, a folder per class, or the features and labels of fast-DiT."""

    name = "latents"

    path: FilePath
    """Dataset folder; its layout is detected."""
    scale: Finite | None = None
    """The model's input is (stored - shift) * scale. Unset: the manifest's, else 1."""
    shift: Finite | None = None
    """Unset: the manifest's, else 0."""
    verify: bool = False
    """Check all data at the start: the SHA-256 of every shard, or every file of a folder."""


@dataclass(frozen=True, kw_only=True)
class DigitsKeys(DataKeys):
    """The 1,797 handwritten digits of the UCI repository, 8x8 in [-1, 1]; part of titan_dit."""

    name = "digits"


@dataclass(frozen=True, kw_only=True)
class SyntheticKeys(DataKeys):
    """Standard normal latents with labels."""

    name = "synthetic"

    latent_size: PositiveInt
    channels: PositiveInt
    num_classes: PositiveInt
    count: PositiveInt = 4096
    """Samples per epoch."""
