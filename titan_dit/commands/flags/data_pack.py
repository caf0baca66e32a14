"""Flags of `data pack`."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Literal

from titan_dit.config.section import (
    Dim,
    Few,
    FilePath,
    Finite,
    OutputPath,
    PositiveInt,
    Section,
    Workers,
)


@dataclass(frozen=True, kw_only=True)
class Options(Section):
    """Pack a folder per class, or fast-DiT's features and labels, into shards."""

    section = "data pack"

    input: FilePath
    """Folder of latents (.npy, .pt, .safetensors) or, for pixel models, of images."""
    output: OutputPath
    """New folder for the shards, which take its name. Interrupted packing resumes."""
    workers: Workers = field(default_factory=lambda: min(16, len(os.sched_getaffinity(0))))
    """Worker processes; the result does not depend on them."""
    dtype: Literal["float16", "float32"] | None = None
    """Dtype of stored latents. Default: float16. Images are uint8."""
    scale: Finite | None = None
    """The model's input is (stored - shift) * scale. Default: the input manifest's, else 1; 1/127.5
    for images."""
    shift: Finite | None = None
    """Default: the input manifest's, else 0; 127.5 for images."""
    num_classes: Dim | None = None
    """Number of classes, if the input lacks some. Default: as found."""
    classes: FilePath | None = None
    """Text file of the class folder names in label order, one per line."""
    image_size: Few | None = None
    """Resize and center-crop images to squares of this many pixels, like ADM and DiT."""
    max_pixels: PositiveInt | None = None
    """Pixels of a picture. Larger ones are dropped. Default: those that 512 MiB decode."""
    verify: bool = False
    """Compare the contents of files that were packed before, not only length and time of
    modification."""
    source: str | None = None
    """Description of the data's origin, for the manifest."""
    shard_size: PositiveInt | None = None
    """Samples per shard. Default: 128 MiB."""
