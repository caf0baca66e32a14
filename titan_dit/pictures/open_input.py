"""Choose the reader of pictures by what a path holds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from titan_dit.config.section import UserError
from titan_dit.data.class_labels import few
from titan_dit.data.listing import entries, holds_samples
from titan_dit.data.recognise import check_path
from titan_dit.launcher import open_files
from titan_dit.pictures.picture_set import Asked, PictureSet
from titan_dit.pictures.read_folder import open_folder
from titan_dit.pictures.read_metadata import FILES, open_metadata
from titan_dit.pictures.read_parquet import open_parquet
from titan_dit.pictures.read_tars import open_tars

SPLITS = {
    "train": ("train", "training"),
    "test": ("test",),
    "val": ("val", "valid", "validation"),
}
"""Splits, and the names of each."""
READERS = {".parquet": open_parquet, ".tar": open_tars}


def open_input(path: Path, asked: Asked) -> PictureSet:
    """List the pictures of a folder, or of one parquet or tar file.

    A metadata file in the folder comes first, then parquet or tar files in it or below, then a
    folder for each class.
    """
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
    return open_folder(path, asked)


def refuse_split(asked: Asked, reason: str) -> None:
    """Raise UserError if a split is chosen where there is none."""
    if asked.split:
        raise UserError(f"[data encode] split={asked.split}: {reason}. Leave --split out.")


def open_listed(folder: Path, asked: Asked) -> PictureSet | None:
    """The pictures that a folder's metadata, parquet or tar files list; None if it has none.

    Raises UserError for parquet or tar files beside class folders: it would leave one of them out.
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


def of_split(folder: Path, files: Sequence[Path], asked: Asked) -> list[Path]:
    """The files of a split; UserError if there are several and none is named."""
    if split := asked.split:
        found = [file for file in files if is_of(split, file, folder)]
        if not found:
            names = few([str(file.relative_to(folder)) for file in files])
            raise UserError(f"[data encode] split={split}: {folder} holds {names}.")
        return found
    known = {name for name in SPLITS for file in files if is_of(name, file, folder)}
    if len(known) > 1:
        fix = "Give a folder of one of them." if asked.gaps else "Choose one: --split train."
        splits = ", ".join(sorted(known))
        raise UserError(f"{asked.where}{folder} holds the splits {splits}. {fix}")
    return list(files)


def is_of(split: str, file: Path, folder: Path) -> bool:
    """True if the file, or a folder between, is named train, train-0, train_0: not trainee-0."""
    names = map(re.escape, SPLITS.get(split, (split,)))
    begins = re.compile(rf"({'|'.join(names)})(?![^\W_])")
    return any(begins.match(part) for part in file.relative_to(folder).parts)
