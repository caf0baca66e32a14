"""Pictures in a folder for each class."""

from __future__ import annotations

from pathlib import Path

from titan_dit.config.section import UserError
from titan_dit.data.files import read_whole, stamp_of
from titan_dit.data.listing import list_folder
from titan_dit.pictures.picture_set import Asked, PictureSet, Stamp


def open_folder(root: Path, asked: Asked) -> PictureSet:
    """List the pictures; classes are folders, numbered as `data pack` does."""
    listing = list_folder(root, asked.num_classes, asked.classes)
    if listing.kind != "images":
        raise UserError(
            f"{asked.where}{root} holds latents, which are encoded already: `data pack`."
        )

    def read(row: int) -> bytes:
        return bytes(read_whole(root / listing.names[row], asked.check_size))

    def stamp(row: int) -> Stamp:
        return stamp_of(root / listing.names[row])

    return PictureSet(
        root,
        "a folder per class",
        listing.names,
        listing.labels,
        listing.num_classes,
        listing.class_names,
        [],
        read,
        stamp,
        asked.max_file_bytes,
    )
