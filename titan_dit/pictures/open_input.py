"""Choose the reader of pictures by what a path holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from titan_dit.config.section import UserError
from titan_dit.data.class_labels import few
from titan_dit.data.recognise import check_path
from titan_dit.pictures.picture_set import Asked, PictureSet
from titan_dit.pictures.read_folder import open_folder
from titan_dit.pictures.read_metadata import FILES, open_metadata
from titan_dit.pictures.read_parquet import open_parquet
from titan_dit.pictures.read_tars import open_tars

SPLITS = ("train", "test", "val")
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
        return reader(path.parent, [path], asked)
    check_path(path, asked.where)
    if (found := open_listed(path, asked)) is not None:
        return found
    if asked.split:
        raise UserError(f"[data encode] split={asked.split}: {path} holds no parquet or tar files.")
    return open_folder(path, asked)


def open_listed(folder: Path, asked: Asked) -> PictureSet | None:
    """The pictures that a folder's metadata, parquet or tar files list; None if it has none."""
    if listed := [folder / name for name in FILES if (folder / name).is_file()]:
        if len(listed) > 1:
            names = few([file.name for file in listed])
            raise UserError(f"{asked.where}{folder} holds {names}. Keep one of them.")
        return open_metadata(folder, listed[0], asked)
    for suffix, reader in READERS.items():
        files = sorted(file for file in folder.rglob(f"*{suffix}") if file.name[0] != ".")
        if files:
            return reader(folder, of_split(folder, files, asked), asked)
    return None


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
    """True if the name of the file, or of a folder between, begins with the split's."""
    return any(part.startswith(split) for part in file.relative_to(folder).parts)
