"""Pictures to score: a folder, a .npz in ADM's format, or batches in memory."""

from __future__ import annotations

import hashlib
import io
import math
import os
import sys
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from titan_dit.config import limits
from titan_dit.config.section import UserError
from titan_dit.data.files import BadFileError, read_whole
from titan_dit.data.listing import IMAGE_SUFFIXES, Names
from titan_dit.data.packing.images import DecodingBudget, decode_image
from titan_dit.pictures.picture_set import ListingOptions, PictureSet
from titan_dit.pictures.readers import open_listed
from titan_dit.scores.moments import Moments

PICTURES = "arr_0"
"""Array of a .npz: pictures, uint8 [n, h, w, 3] (arXiv:2105.05233's evaluator)."""
LABELS = "arr_1"
"""Optional array of a .npz: integer class of each picture."""
UNPACKED, MAX_RATIO = 64 << 20, 50
"""Maximum bytes of an unpacked array: UNPACKED, or MAX_RATIO times its compressed bytes if more.
Pictures unpack to two or three times."""
HEADER_BYTES = 16 << 10
"""Maximum bytes of a .npy header. numpy refuses 10,000, but only after it has read up to 4 GiB."""
OTHERS = (".gif", ".tif", ".tiff", ".heic", ".avif", ".jp2")
"""Suffixes of picture formats that are not read."""


@dataclass(frozen=True)
class Pictures:
    """A set of pictures of one size."""

    count: int
    read: Callable[[range], UInt8[Tensor, "b h w 3"]]
    digest: Callable[[], str]
    """SHA-256 of the pictures. A folder is read whole for it. Raises UserError."""
    about: str
    classes: Mapping[str, int] = field(default_factory=dict)
    """Pictures of each class, by its name or number; empty if they have no classes."""
    moments: Moments | None = None
    """Moments in a reference's file, for FID. ADM's are those of a whole dataset, its pictures only
    a part of it."""
    formats: tuple[str, ...] = ()
    """Formats of the files, such as JPEG; () if not known."""


@dataclass(frozen=True)
class FolderPictures:
    """The pictures of a folder."""

    names: Sequence[str]
    read: Callable[[int], bytes]
    """The file of a picture. Raises BadFileError or OSError."""
    classes: Mapping[str, int]
    """Pictures of each class, see `Pictures.classes`."""


def open_folder(folder: Path, size: int | None, where: str) -> Pictures:
    """The pictures of a folder, cropped to `size` as for training, with their classes.

    Without a `size` all pictures must have the size of the first. `where` names the flag or key in
    errors.
    """
    found = listed(folder, where)
    budget = DecodingBudget()

    def read(rows: range) -> Tensor:
        shape = shape_of_first() if size is None else (3, size, size)
        return torch.stack([one(row, shape).permute(1, 2, 0) for row in rows])

    def one(row: int, shape: tuple[int, ...] | None = None) -> Tensor:
        with naming(row):
            return decode_image(found.read(row), size, shape, budget).pixels

    @contextmanager
    def naming(row: int) -> Iterator[None]:
        try:
            yield
        except (BadFileError, OSError) as error:
            raise UserError(
                f"{where}: {folder / found.names[row]}: {error}. Restore or remove it."
            ) from None

    @cache
    def shape_of_first() -> tuple[int, ...]:
        return (3, *one(0).shape[1:])

    def digest() -> str:
        sha = hashlib.sha256(f"{size}\n".encode())
        for row in range(len(found.names)):
            with naming(row):
                sha.update(hashlib.sha256(found.read(row)).digest())
        return sha.hexdigest()

    about = f"{len(found.names):,} pictures of {folder}"
    formats = formats_of(found.names)
    return Pictures(len(found.names), read, digest, about, found.classes, formats=formats)


def formats_of(names: Sequence[str]) -> tuple[str, ...]:
    """The formats of files, by their suffixes."""
    suffixes = {Path(name).suffix.lower().removeprefix(".") for name in names} - {""}
    return tuple(sorted({"JPEG" if suffix == "jpg" else suffix.upper() for suffix in suffixes}))


def listed(folder: Path, where: str) -> FolderPictures:
    """The pictures that metadata, parquet or tar files list; without any, all below the folder.

    Classes may be missing, as among drawn pictures. Without a list they are the top folders. Raises
    UserError if there are none.
    """
    by_list = open_listed(folder, ListingOptions.to_score(f"{where} "))
    if by_list is not None:
        return FolderPictures(by_list.names, by_list.read, counts_of(by_list))
    names = Names(below(folder, where))
    if not len(names):
        raise UserError(
            f"{where} {folder} holds no pictures ({', '.join(IMAGE_SUFFIXES)}). Give the folder "
            "that does."
        )

    def read(row: int) -> bytes:
        return bytes(read_whole(folder / names[row]))

    return FolderPictures(names, read, folder_counts(names))


def counts_of(listed: PictureSet) -> dict[str, int]:
    """Pictures of each class."""
    counts = Counter(label for label in listed.labels.tolist() if label >= 0)
    names = listed.class_names
    return {names[label] if names else str(label): counts[label] for label in sorted(counts)}


def folder_counts(names: Sequence[str]) -> dict[str, int]:
    """Pictures in each top folder; {} if a picture is in none. Folder 007 is class 7."""
    counts: Counter[str] = Counter()
    for name in names:
        folder, inside, _ = name.partition(os.sep)
        if not inside:
            return {}
        counts[str(int(folder)) if folder.isdecimal() else folder] += 1
    return dict(counts)


def below(folder: Path, where: str) -> list[str]:
    """Paths of all pictures below a folder, sorted, without hidden ones.

    Raises UserError for a picture of an unreadable format: the scores would miss it.
    """
    found = []
    for root, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if name[0] != "." and not is_loop(root, name)]
        names = [name for name in names if name[0] != "."]
        if others := sorted(name for name in names if Path(name).suffix.lower() in OTHERS):
            raise UserError(
                f"{where} {folder}: {Path(root) / others[0]} has a format that is not read. "
                f"Convert it to one of {', '.join(IMAGE_SUFFIXES)}, or move it elsewhere."
            )
        found += [
            str((Path(root) / name).relative_to(folder))
            for name in names
            if Path(name).suffix.lower() in IMAGE_SUFFIXES
        ]
    return sorted(found)


def is_loop(folder: str, name: str) -> bool:
    """True for a link to the folder that contains it, or to one above."""
    link = Path(folder) / name
    return link.is_symlink() and link.parent.resolve().is_relative_to(link.resolve())


def open_npz(path: Path, where: str, *, labelled: bool = True) -> Pictures:
    """The pictures of a .npz. An uncompressed array is not read into memory.

    `labelled`: read and check the classes, if there are any. Raises UserError for other arrays than
    uint8 [n, height, width, 3].
    """
    array = array_of(path, where)
    if array.dtype != np.uint8 or array.ndim != 4 or array.shape[3] != 3 or not len(array):
        raise UserError(
            f"{where} {path}: {PICTURES} is {array.dtype} {list(array.shape)}, not uint8 "
            "[n, height, width, 3]. Save 8-bit RGB."
        )

    def read(rows: range) -> Tensor:
        return torch.from_numpy(np.array(array[rows.start : rows.stop]))

    about = f"{len(array):,} pictures of {path}"
    classes = counts_in(path, where, len(array)) if labelled else {}

    def digest() -> str:
        sha = hashlib.sha256()
        for row in array:  # It may be in Fortran's order.
            sha.update(np.ascontiguousarray(row).data)
        return sha.hexdigest()

    return Pictures(len(array), read, digest, about, classes)


def counts_in(path: Path, where: str, count: int) -> dict[str, int]:
    """Pictures of each class in a .npz of `count` pictures; {} if it has no labels.

    Raises UserError for labels of another shape or dtype.
    """
    if LABELS not in names_in(path, where):
        return {}
    labels = array_of(path, where, LABELS)
    if labels.dtype.kind not in "iu" or labels.shape != (count,):
        raise UserError(
            f"{where} {path}: {LABELS} is {labels.dtype} {list(labels.shape)}, not the class "
            f"numbers of {count} pictures, integers [{count}]. Correct it, or leave it out."
        )
    counts = Counter(labels.tolist())
    return {str(label): counts[label] for label in sorted(counts) if label >= 0}


def names_in(path: Path, where: str) -> set[str]:
    """Names of the arrays of a .npz; UserError if it is none."""
    try:
        with zipfile.ZipFile(path) as archive:
            return {name.removesuffix(".npy") for name in archive.namelist()}
    except (OSError, zipfile.BadZipFile) as error:
        raise UserError(
            f"{where} {path} is not a .npz file ({error}). Write it by numpy.savez."
        ) from None


def array_of(path: Path, where: str, name: str = PICTURES) -> np.ndarray:
    """An array of a .npz, mapped into memory if it is not compressed.

    Raises UserError if it is missing or unreadable.
    """
    found = names_in(path, where)
    if name not in found:
        raise UserError(
            f"{where} {path} holds {', '.join(sorted(found))}, but no {name}. Save the array by "
            "this name."
        )
    try:
        with zipfile.ZipFile(path) as archive:
            array = read_array(path, archive, archive.getinfo(f"{name}.npy"))
        check_text(array)
        return array
    except Exception as error:  # zipfile, zlib and numpy raise any exception on a damaged file.
        reason = " ".join(str(error).split())[:250] or type(error).__name__
        raise UserError(f"{where} {path}: {name} cannot be read ({reason}).") from None


def read_array(path: Path, archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> np.ndarray:
    """See `array_of`. ValueError if it would take far more memory than its compressed bytes."""
    if entry.compress_type == zipfile.ZIP_STORED:
        return mapped(path, archive, entry)
    if entry.compress_type != zipfile.ZIP_DEFLATED:
        # Python decompresses bzip2 and LZMA by the block: 4 KiB of a file become gigabytes.
        raise ValueError("compressed otherwise than by numpy.savez_compressed")
    with archive.open(entry) as file:
        shape, _, dtype, _ = header_of(file)
    size = math.prod(shape) * dtype.itemsize
    most = limits.raised(max(UNPACKED, MAX_RATIO * entry.compress_size))
    if size > most:
        raise ValueError(
            f"{size:,} bytes from {entry.compress_size:,}; save it without compression: "
            f"numpy.savez. {limits.fix(size, most).rstrip('.')}"
        )
    with archive.open(entry) as file:
        whole: np.ndarray = np.lib.format.read_array(file)
        return whole


def check_text(array: np.ndarray) -> None:
    """Raise ValueError for text with invalid code points, of which numpy makes bad strings."""
    if array.dtype.kind != "U" or not array.dtype.itemsize:
        return
    codes = np.frombuffer(array.tobytes(), np.dtype(np.uint32).newbyteorder(array.dtype.byteorder))
    if codes.size and codes.max() > sys.maxunicode:
        raise ValueError("text that is not Unicode")


def header_of(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """(shape, Fortran order, dtype, bytes of the header) of a .npy."""
    head = io.BytesIO(file.read(HEADER_BYTES))
    version = np.lib.format.read_magic(head)
    if version == (1, 0):
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(head)
    else:
        shape, fortran, dtype = np.lib.format.read_array_header_2_0(head)
    return shape, fortran, dtype, head.tell()


def mapped(path: Path, archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> np.ndarray:
    """An uncompressed array of a .npz, as a memory map. Raises ValueError for Python objects."""
    with archive.open(entry) as file:
        shape, fortran, dtype, length = header_of(file)
    if dtype.hasobject:  # Mapped, they would be read as addresses.
        raise ValueError("it holds Python objects, not numbers")
    with path.open("rb") as raw:
        raw.seek(entry.header_offset + 26)
        lengths = np.frombuffer(raw.read(4), "<u2")
    first = entry.header_offset + 30 + int(lengths.sum()) + length
    found: np.ndarray = np.memmap(str(path), dtype, "r", first, shape, "F" if fortran else "C")
    return found
