"""Choose the reader of pictures by what a path holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from titan_dit.config.section import UserError
from titan_dit.data.class_labels import few
from titan_dit.data.recognise import check_path
from titan_dit.pictures.picture_set import PictureSet
from titan_dit.pictures.read_folder import open_folder
from titan_dit.pictures.read_metadata import FILES, open_metadata
from titan_dit.pictures.read_parquet import open_parquet
from titan_dit.pictures.read_tars import open_tars

READERS = {".parquet": open_parquet, ".tar": open_tars}


def open_input(
    path: Path,
    *,
    split: str | None = None,
    classes: Sequence[str] | None = None,
    num_classes: int | None = None,
) -> PictureSet:
    """List the pictures of a folder, or of one parquet or tar file.

    A metadata file in the folder comes first, then parquet or tar files in it or below, then a
    folder for each class. `split`: only files whose name begins with it.
    """
    given = {"classes": classes, "num_classes": num_classes}
    if path.is_file():
        reader = READERS.get(path.suffix)
        if reader is None:
            raise UserError(
                f"[data encode] input={path}: give a folder, a .parquet or a .tar file."
            )
        return reader(path.parent, [path], **given)  # type: ignore[arg-type]
    check_path(path)
    if listed := [path / name for name in FILES if (path / name).is_file()]:
        if len(listed) > 1:
            names = few([file.name for file in listed])
            raise UserError(f"[data encode] input={path} holds {names}. Keep one of them.")
        return open_metadata(path, listed[0], **given)  # type: ignore[arg-type]
    for suffix, reader in READERS.items():
        files = sorted(file for file in path.rglob(f"*{suffix}") if not file.name.startswith("."))
        if files:
            return reader(path, of_split(path, files, split), **given)  # type: ignore[arg-type]
    if split:
        raise UserError(f"[data encode] split={split}: {path} holds no parquet or tar files.")
    return open_folder(path, **given)  # type: ignore[arg-type]


def of_split(path: Path, files: Sequence[Path], split: str | None) -> list[Path]:
    """The files of a split; UserError if there are several and none is named."""
    if split:
        found = [file for file in files if file.name.startswith(split)]
        if not found:
            raise UserError(f"[data encode] split={split}: {path} holds {few(names_of(files))}.")
        return found
    known = {name for name in ("train", "test", "val") for f in files if f.name.startswith(name)}
    if len(known) > 1:
        raise UserError(
            f"[data encode] input={path} holds the splits {', '.join(sorted(known))}. Choose one: "
            "--split train."
        )
    return list(files)


def names_of(files: Sequence[Path]) -> list[str]:
    """File names."""
    return [file.name for file in files]
