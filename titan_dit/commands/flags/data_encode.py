"""Flags of `data encode`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from titan_dit.config.section import (
    BatchSize,
    Dim,
    Few,
    FilePath,
    OutputPath,
    PositiveInt,
    Section,
    Workers,
)


@dataclass(frozen=True, kw_only=True)
class Options(Section):
    """Encode pictures by an autoencoder into shards of latents. NGPU=n: ranks that share it."""

    section = "data encode"

    input: FilePath
    """Pictures: a folder for each class, a folder with metadata.jsonl, .csv or .parquet, or
    parquet or tar files."""
    output: OutputPath
    """New folder for the shards, which take its name. Interrupted encoding resumes."""
    vae: FilePath
    """Folder of an autoencoder of diffusers, or of a pipeline; or its name on the hub."""
    image_size: Few
    """Resize and center-crop pictures to squares of this many pixels, like ADM and DiT."""
    flip: bool = False
    """True: the mirror image of each picture is a row of its own."""
    posterior: Literal["both", "mean"] = "both"
    """Store mean and std, of which training draws, or the mean."""
    units: Literal["vae", "measured"] = "vae"
    """Scale and shift of the model's input: the autoencoder's, or 1 / std and mean of each channel
    over the data."""
    batch_size: BatchSize = 32
    """Rows that are encoded at once. Another number changes last bits."""
    dtype: Literal["float16", "float32"] = "float16"
    """Dtype of stored latents."""
    classes: FilePath | None = None
    """Text file of the class names in label order, one per line."""
    num_classes: Dim | None = None
    """Number of classes, if the input lacks some. Default: as found."""
    split: str | None = None
    """Of parquet or tar files: only those whose name, or folder's, begins with it: train."""
    shard_size: PositiveInt | None = None
    """Pictures per shard. Default: 128 MiB, or less if that is below 64 shards."""
    workers: Workers | None = None
    """Threads of a rank that decode pictures. Default: up to 16, by cores. Bytes are the same."""
    max_pixels: PositiveInt | None = None
    """Pixels of a picture. Larger ones are dropped. Default: those that 512 MiB decode."""
    max_file_bytes: PositiveInt = 256 << 20
    """Bytes of a picture's file. Larger ones are dropped."""
    max_text_bytes: PositiveInt = 1 << 20
    """Bytes of a row of metadata, or of a text beside a picture in a tar."""
    max_rows: PositiveInt | None = None
    """Rows of parquet files. Default: a million, or one for each 16 bytes of the files."""
    verify: bool = False
    """Compare the contents of pictures that were encoded before, not only length and time of
    modification of their files."""
    source: str | None = None
    """Description of the data's origin, for the manifest."""
    device: str | None = None
    """Default: cuda if available, else cpu."""
