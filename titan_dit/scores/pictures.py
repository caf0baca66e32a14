"""Pictures to be scored: a folder, a .npz as ADM writes it, or batches in memory."""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor

from titan_dit.config.section import UserError
from titan_dit.data.files import BadFileError
from titan_dit.data.packing.images import read_image

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
PICTURES = "arr_0"
"""Of a .npz: uint8 [n, h, w, 3] (arXiv:2105.05233's evaluator)."""


@dataclass(frozen=True)
class Pictures:
    """A set of pictures of one size."""

    count: int
    read: Callable[[range], UInt8[Tensor, "b h w 3"]]
    digest: Callable[[], str]
    """SHA-256 of what is read, or of names and sizes of files."""
    about: str


def of_folder(folder: Path, size: int | None, where: str) -> Pictures:
    """All pictures below a folder, in the order of their names, cropped to `size` as for training.

    Without a `size` all must have that of the first. `where` names the flag or key in errors.
    """
    files = sorted(
        Path(root) / name
        for root, _, names in os.walk(folder)
        for name in names
        if name.lower().endswith(SUFFIXES)
    )
    if not files:
        raise UserError(f"{where} {folder} holds no pictures ({', '.join(SUFFIXES)}).")

    def read(rows: range) -> Tensor:
        found = []
        for row in rows:
            try:
                shape = shape_of_first() if size is None else (3, size, size)
                found.append(read_image(files[row], size, shape).permute(1, 2, 0))
            except (BadFileError, OSError) as error:
                raise UserError(f"{where}: {files[row]}: {error}.") from None
        return torch.stack(found)

    @cache
    def shape_of_first() -> tuple[int, ...]:
        with Image.open(files[0]) as image:
            return (3, image.height, image.width)

    def digest() -> str:
        sha = hashlib.sha256(f"{size}\n".encode())
        for file in files:
            sha.update(f"{file.relative_to(folder)} {file.stat().st_size}\n".encode())
        return sha.hexdigest()

    return Pictures(len(files), read, digest, f"{len(files):,} pictures of {folder}")


def of_npz(path: Path, where: str) -> Pictures:
    """The pictures of a .npz. One that is not compressed is not read into memory."""
    array = array_of(path, where)
    if array.dtype != np.uint8 or array.ndim != 4 or array.shape[3] != 3 or not len(array):
        raise UserError(
            f"{where} {path}: {PICTURES} is {array.dtype} {list(array.shape)}, not uint8 "
            "[n, height, width, 3]."
        )

    def read(rows: range) -> Tensor:
        return torch.from_numpy(np.array(array[rows.start : rows.stop]))

    return Pictures(
        len(array),
        read,
        lambda: hashlib.sha256(array.data).hexdigest(),
        f"{len(array):,} pictures of {path}",
    )


def of_batches(batches: Sequence[UInt8[Tensor, "b h w 3"]], about: str) -> Pictures:
    """Pictures in memory."""
    whole = torch.cat(tuple(batches))
    digest = hashlib.sha256(whole.numpy().data).hexdigest
    return Pictures(len(whole), lambda rows: whole[rows.start : rows.stop], digest, about)


def names_in(path: Path, where: str) -> set[str]:
    """Names of the arrays of a .npz; UserError if it is none."""
    try:
        with zipfile.ZipFile(path) as archive:
            return {name.removesuffix(".npy") for name in archive.namelist()}
    except (OSError, zipfile.BadZipFile) as error:
        raise UserError(f"{where} {path} is not a .npz file ({error}).") from None


def array_of(path: Path, where: str, name: str = PICTURES) -> np.ndarray:
    """An array of a .npz, mapped into memory if it is not compressed."""
    found = names_in(path, where)
    if name not in found:
        raise UserError(f"{where} {path} holds {', '.join(sorted(found))}, but no {name}.")
    with zipfile.ZipFile(path) as archive:
        entry = archive.getinfo(f"{name}.npy")
        if entry.compress_type == zipfile.ZIP_STORED:
            with archive.open(entry) as file:
                version = np.lib.format.read_magic(file)
                header = (
                    np.lib.format.read_array_header_1_0(file)
                    if version == (1, 0)
                    else np.lib.format.read_array_header_2_0(file)
                )
                length = file.tell()
            shape, fortran, dtype = header
            with path.open("rb") as raw:
                raw.seek(entry.header_offset + 26)
                lengths = np.frombuffer(raw.read(4), "<u2")
            first = entry.header_offset + 30 + int(lengths.sum()) + length
            mapped: np.ndarray = np.memmap(
                str(path), dtype, "r", first, shape, "F" if fortran else "C"
            )
            return mapped
    with np.load(path) as arrays:
        whole: np.ndarray = arrays[name]
        return whole


def digest_of_file(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
