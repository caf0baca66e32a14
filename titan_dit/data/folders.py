"""Unpacked latents: one file per sample."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from copy import copy
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from titan_dit.config.section import UserError
from titan_dit.data.base import Source
from titan_dit.data.files import BadFileError, read_latent
from titan_dit.data.latent_facts import LatentFacts, Shape
from titan_dit.data.listing import Listing, list_folder
from titan_dit.data.manifest import MANIFEST, agreed, check_channels, read_folder_manifest
from titan_dit.system.progress import ProgressLine

REMEDY = (
    "Fix or replace the file, or pack the folder: `python -m titan_dit data pack` drops and "
    "lists such files."
)


class LatentFolder(Source):
    """Latents in one folder per class, or in fast-DiT's features and labels.

    Opening lists the files and reads one file of each of up to 32 classes. Every file is checked
    when it is read; `verify` reads all of them at the start. `listing` is a listing made on another
    rank.
    """

    def __init__(
        self,
        path: Path,
        scale: float | None = None,
        shift: float | None = None,
        verify: bool = False,
        listing: Listing | None = None,
    ) -> None:
        manifest = read_folder_manifest(path)
        units = {
            "scale": agreed("scale", scale, manifest["scale"], 1.0, path),
            "shift": agreed("shift", shift, manifest["shift"], 0.0, path),
        }
        self.origin: str | None = manifest["source"]
        self.listing = list_folder(path) if listing is None else listing
        if self.listing.kind == "images":
            raise UserError(
                f"[data] path={path} holds images ({self.listing.names[0]}). Make latents of them "
                f"first, `python -m titan_dit data encode --input {path} --out DIR --vae VAE "
                "--image-size N`, or for a model of pixels `python -m titan_dit data pack --input "
                f"{path} --out DIR`, then give DIR. See docs/data.md."
            )
        self.shape, self.dtype = self._probe()
        for key, value in units.items():
            check_channels(value, key, self.shape[0], path / MANIFEST)
        self.facts: LatentFacts = LatentFacts(
            shape=self.shape,
            count=len(self.listing.names),
            num_classes=self.listing.num_classes,
            class_names=self.listing.class_names,
            scale=units["scale"],
            shift=units["shift"],
            digest=digest_of_listing(
                self.listing, f"{self.shape} {units['scale']} {units['shift']}"
            ),
        )
        self.fields = self.facts.fields(self.dtype)
        if verify:
            self._read_all()

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Read one file."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        latent = self._read(index, self.shape)
        if latent.dtype != self.dtype and self.dtype == torch.float16:
            raise UserError(
                f"[data] {self.path_of(index)}: holds float32, but the first files hold float16. "
                f"{REMEDY.replace('drops and lists such files', 'casts all to one dtype')}"
            )
        shaped = latent.to(self.dtype).view(self.facts.shape)
        return {"latent": shaped, "label": self.listing.labels[index]}

    def read(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """Read the files of these rows."""
        latents = torch.empty(len(rows), *self.facts.shape, dtype=self.dtype)
        out = latents.numpy()
        for i, row in enumerate(rows):
            out[i] = self[row]["latent"].numpy()
        return {"latent": latents, "label": self.listing.labels[torch.tensor(rows)]}

    def as_clips(self) -> LatentFolder:
        """See `Source.as_clips`; files hold pictures."""
        found = copy(self)
        found.facts = self.facts.as_clips()
        found.fields = found.facts.fields(self.dtype)
        return found

    def groups(self) -> Int64[Tensor, " n"]:
        """Return the labels."""
        return self.listing.labels

    def path_of(self, index: int) -> Path:
        """Path of a sample's file."""
        return self.listing.root / self.listing.names[index]

    def _read(self, index: int, shape: tuple[int, ...] | None) -> Float[Tensor, "c h w"]:
        try:
            return read_latent(self.path_of(index), shape)
        except BadFileError as error:
            raise UserError(f"[data] {self.path_of(index)}: {error}. {REMEDY}") from None
        except OSError as error:
            raise UserError(f"[data] {error}") from None

    def _read_all(self) -> None:
        """Read every file once; raises UserError for the first bad one."""
        progress = ProgressLine(len(self), "files", what="verified")
        for row in range(len(self)):
            self[row]
            progress(row + 1)
        progress.end()

    def _probe(self, most: int = 32) -> tuple[Shape, torch.dtype]:
        """Return the common shape and dtype of one file of each of up to `most` classes."""
        firsts = np.unique(self.listing.labels.numpy(), return_index=True)[1]
        rows = firsts[:: -(-len(firsts) // most)].tolist()
        latents = [self._read(row, None) for row in rows]
        shape = tuple(latents[0].shape)
        for row, latent in zip(rows, latents, strict=True):
            if tuple(latent.shape) != shape:
                raise UserError(
                    f"[data] {self.path_of(row)}: shape {list(latent.shape)}, but "
                    f"{self.path_of(rows[0])} has {list(shape)}. {REMEDY}"
                )
        half = all(latent.dtype == torch.float16 for latent in latents)
        return shape, torch.float16 if half else torch.float32


def digest_of_listing(listing: Listing, units: str) -> str:
    """Return a digest of the file names, labels, shape and units, not of the contents.

    Reading a million files would take hours; shards have a digest of their contents.
    """
    sha = hashlib.sha256(f"{listing.layout} {listing.num_classes} {units}\n".encode())
    sha.update(listing.names.ends.tobytes() + listing.names.block)
    sha.update(listing.labels.numpy().tobytes())
    return sha.hexdigest()
