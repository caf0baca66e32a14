"""Choose the reader of an input (folder, metadata file, parquet or tar files), and its split."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from titan_dit.config.section import UserError, few
from titan_dit.data.listing import (
    check_path,
    entries,
    holds_samples,
    list_folder,
)
from titan_dit.pictures.captioned_folder import (
    apply_caption_rule,
    files_at,
    files_of,
    open_captioned,
    with_prefix,
)
from titan_dit.pictures.companions import with_companions
from titan_dit.pictures.metadata import FILES, open_metadata
from titan_dit.pictures.parquet import open_parquet
from titan_dit.pictures.picture_set import (
    ListingOptions,
    PictureSet,
)
from titan_dit.pictures.tars import open_tars
from titan_dit.ranks import open_files

SPLITS = {
    "train": ("train", "training"),
    "test": ("test",),
    "val": ("val", "valid", "validation"),
}
"""Split -> names that its files may begin with."""
READERS = {".parquet": open_parquet, ".tar": open_tars}


def open_input(path: Path, asked: ListingOptions) -> PictureSet:
    """List the pictures of a folder, or of one parquet or tar file.

    In a folder the first of these is read: a metadata file; parquet or tar files in it or below;
    pictures with captions beside them; a folder per class. References and masks may lie beside the
    pictures of folders, and in tar files.
    """
    found = with_companions(open_any(path, asked), asked)
    return with_prefix(apply_caption_rule(found, asked), asked)


def open_any(path: Path, asked: ListingOptions) -> PictureSet:
    """See `open_input`: before companions and captions. Raises UserError."""
    if path.is_file():
        reader = READERS.get(path.suffix)
        if reader is None:
            raise UserError(f"{asked.where}{path}: give a folder, a .parquet or a .tar file.")
        refuse_split(asked, f"{path} is one file")
        return reader(path.parent, [path], asked)
    check_path(path, asked.where)
    if (found := open_listed(path, asked)) is not None:
        return found
    refuse_split(asked, f"{path} holds no parquet or tar files")
    if (files := files_of(path, asked.clips)).is_captioned:
        return open_captioned(path, files, asked)
    return open_folder(path, asked)


def open_listed(folder: Path, asked: ListingOptions) -> PictureSet | None:
    """The pictures listed by a folder's metadata, parquet or tar files; None if it has none.

    Raises UserError for parquet or tar files beside class folders: one of the two would be left
    out.
    """
    if listed := [folder / name for name in FILES if (folder / name).is_file()]:
        if len(listed) > 1:
            names = few([file.name for file in listed])
            raise UserError(f"{asked.where}{folder} holds {names}. Keep one of them.")
        refuse_split(asked, f"{listed[0]} lists the pictures")
        return open_metadata(folder, listed[0], asked)
    found = {
        suffix: sorted(file for file in folder.rglob(f"*{suffix}") if file.name[0] != ".")
        for suffix in READERS
    }
    # img2dataset writes a table of the same name beside each tar file.
    if all(file.with_suffix(".tar") in found[".tar"] for file in found[".parquet"]):
        found[".parquet"] = []
    kinds = [suffix for suffix, files in found.items() if files]
    if not kinds:
        return None
    classes = [name for name in entries(folder)[0] if holds_samples(folder / name)]
    both = [*(found[suffix][0].relative_to(folder) for suffix in kinds), *classes]
    if len(kinds) > 1 or classes:
        raise UserError(
            f"{asked.where}{folder} holds {few(both)}: two datasets in one folder. Give one of "
            "them, or move each to its own folder."
        )
    files = of_split(folder, found[kinds[0]], asked)
    open_files.raise_limit(open_files.OTHERS["cpu"] + len(files), f"{asked.where}{folder}")
    return READERS[kinds[0]](folder, files, asked)


def open_folder(root: Path, asked: ListingOptions) -> PictureSet:
    """List the pictures; classes are folders, numbered as `data pack` does. Raises UserError."""
    listing = list_folder(root, asked.num_classes, asked.classes)
    if listing.kind != "images":
        raise UserError(
            f"{asked.where}{root} holds latents, which are encoded already. Use `data pack`."
        )

    path, read, stamp = files_at(root, listing.names, asked)
    return PictureSet(
        root=root,
        kind="a folder per class",
        names=listing.names,
        labels=listing.labels,
        num_classes=listing.num_classes,
        class_names=listing.class_names,
        texts=[],
        read=read,
        stamp=stamp,
        max_file_bytes=asked.max_file_bytes,
        path=path,
    )


def of_split(folder: Path, files: Sequence[Path], asked: ListingOptions) -> list[Path]:
    """The files of a split. UserError if there are several splits and none is named."""
    if split := asked.split:
        found = [file for file in files if is_of(split, file, folder)]
        if not found:
            names = few([str(file.relative_to(folder)) for file in files])
            raise UserError(
                f"[data encode] split={split}: {folder} holds {names}. Give the split of one of "
                "them, or leave --split out."
            )
        return found
    known = {name for name in SPLITS for file in files if is_of(name, file, folder)}
    if len(known) > 1:
        fix = "Give a folder of one of them." if asked.gaps else "Choose one: --split train."
        splits = ", ".join(sorted(known))
        raise UserError(f"{asked.where}{folder} holds the splits {splits}. {fix}")
    return list(files)


def is_of(split: str, file: Path, folder: Path) -> bool:
    """True if the file, or a folder above it, begins with the split: train-0, not trainee-0."""
    names = map(re.escape, SPLITS.get(split, (split,)))
    begins = re.compile(rf"({'|'.join(names)})(?![^\W_])")
    return any(begins.match(part) for part in file.relative_to(folder).parts)


def refuse_split(asked: ListingOptions, reason: str) -> None:
    """Raise UserError if a split is given for an input without splits."""
    if asked.split:
        raise UserError(f"[data encode] split={asked.split}: {reason}. Leave --split out.")
