"""Pictures in a folder for each class."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from titan_dit.config.section import UserError
from titan_dit.data.files import read_whole
from titan_dit.data.listing import list_folder
from titan_dit.pictures.picture_set import PictureSet


def open_folder(
    root: Path, classes: Sequence[str] | None = None, num_classes: int | None = None
) -> PictureSet:
    """List the pictures; classes are folders, numbered as `data pack` does."""
    listing = list_folder(root, num_classes, classes)
    if listing.kind != "images":
        raise UserError(
            f"[data encode] input={root} holds latents, which are encoded already: `data pack`."
        )

    def read(row: int) -> bytes:
        return bytes(read_whole(root / listing.names[row]))

    return PictureSet(
        root,
        "a folder per class",
        listing.names,
        listing.labels,
        listing.num_classes,
        listing.class_names,
        [],
        read,
    )
