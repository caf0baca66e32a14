"""Read one latent or label file. Never executes code from a file."""

from __future__ import annotations

import io
import math
import os
import pickle
import stat
import warnings
import zipfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors import torch as safetensors
from torch import Tensor

from titan_dit.config import limits

LATENT_SUFFIXES = (".npy", ".pt", ".safetensors")
NPY_MAGIC = b"\x93NUMPY"
LABEL_LIMIT = 2**31
MAX_LATENT_BYTES = 256 << 20
"""Maximum bytes of a file with one latent or picture."""
NO_FILE = (-1, -1)
DAMAGED = "not a readable {} file: damaged, or cut off"


class BadFileError(Exception):
    """The reason why a file is not a valid sample; the caller adds the path."""


def read_latent(path: Path, shape: tuple[int, ...] | None = None) -> Float[Tensor, "c h w"]:
    """Read a finite latent [c, h, w] or [1, c, h, w]; keeps float16, casts other floats to float32.

    Raises BadFileError if `shape` is given and the latent's shape differs.
    """
    latent = read_tensor(path)
    if latent.ndim == 4 and len(latent) == 1:
        latent = latent[0]
    if latent.ndim != 3:
        raise BadFileError(f"shape {list(latent.shape)}, not [c, h, w]")
    if shape is not None and tuple(latent.shape) != shape:
        raise BadFileError(f"shape {list(latent.shape)}, not {list(shape)} like the other files")
    if not latent.numel():
        raise BadFileError("holds no values")
    if not latent.is_floating_point():
        raise BadFileError(f"holds {latent.dtype}, not floating-point numbers")
    if latent.dtype != torch.float16:
        latent = latent.float()
    # numpy takes a third of torch's time on an array this small.
    if not np.isfinite(latent.numpy()).all():
        raise BadFileError("holds NaN or infinity")
    return latent


def read_label(path: Path) -> int:
    """Read the integer of a label file. Raises BadFileError for anything else."""
    label = read_tensor(path)
    if label.numel() != 1 or label.is_complex():
        raise BadFileError(f"holds {list(label.shape)} values, not one label")
    value = label.item()
    if not 0 <= value < LABEL_LIMIT or value != int(value):
        raise BadFileError(f"holds {value}, not a class number from 0 to 2^31 - 1")
    return int(value)


def read_tensor(path: Path) -> Tensor:
    """The tensor of a .npy, .pt or .safetensors file; `latent` if the file has several."""
    data, suffix = read_whole(path), path.suffix.lower()
    if suffix == ".npy":
        return read_npy(data)
    return read_pt(data) if suffix == ".pt" else read_safetensors(data)


def stamp_of(file: Path) -> tuple[int, int]:
    """(length, modification time in ns) of a file; NO_FILE if it is missing."""
    try:
        found = os.stat(file)  # noqa: PTH116 - a set may have millions.
    except OSError:
        return NO_FILE
    return found.st_size, found.st_mtime_ns


def check_latent_size(size: int) -> None:
    """Raise BadFileError for a file that is too large for one sample."""
    most = limits.raised(MAX_LATENT_BYTES)
    if size > most:
        fix = limits.fix(size, most).rstrip(".")
        raise BadFileError(f"{size:,} bytes, more than the {most:,} of one sample. {fix}")


def open_regular(path: Path) -> io.FileIO:
    """Open a file to read it. Raises BadFileError for a pipe or a device, and OSError.

    Without O_NONBLOCK, opening a named pipe would wait for its writer.
    """
    file = io.FileIO(path, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise BadFileError("no regular file")
    return file


def read_whole(path: Path, check_size: Callable[[int], None] = check_latent_size) -> bytearray:
    """Read all bytes; raises BadFileError if the file cannot be opened, OSError on a disk error.

    `check_size` raises BadFileError for a file that is too large.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            check_size(size)
            data = bytearray(size)
            view, filled = memoryview(data), 0
            # Short reads happen: at most 2 GiB per call, less on a network file system.
            while filled < len(data) and (num := file.readinto(view[filled:])):
                filled += num
    except (FileNotFoundError, PermissionError, IsADirectoryError) as error:
        raise BadFileError(f"cannot be opened: {error.strerror}") from None
    if not data:
        raise BadFileError("empty file")
    if filled < len(data):
        raise BadFileError(f"only {filled:,} of its {len(data):,} bytes are readable")
    return data


def read_npy(data: bytearray) -> Tensor:
    """Decode the bytes of a .npy file; zero-copy in native byte order.

    Raises BadFileError for damage, objects, or values other than floating-point.
    """
    wide = data[6:7] != b"\x01"  # The header length has four bytes in version 2, two in 1.
    start = 12 if wide else 10
    start += int.from_bytes(data[8:start], "little")
    if data[:6] != NPY_MAGIC or len(data) < start:
        raise BadFileError(DAMAGED.format(".npy"))
    shape, fortran_order, dtype = npy_header(bytes(data[:start]))
    if dtype.hasobject:
        raise BadFileError("holds pickled objects, whose loading could run code")
    if dtype.kind not in "fiub" or dtype.itemsize > 8:
        raise BadFileError(f"holds {dtype}, not floating-point numbers")
    if len(data) != start + math.prod(shape) * dtype.itemsize:
        raise BadFileError(DAMAGED.format(".npy"))
    array = np.frombuffer(data, dtype, offset=start)
    try:
        array = array.reshape(shape, order="F" if fortran_order else "C")
    except (TypeError, ValueError) as error:  # Of negative numbers the product may be right.
        raise BadFileError(DAMAGED.format(".npy")) from error
    return torch.from_numpy(np.ascontiguousarray(array, dtype.newbyteorder("=")).reshape(shape))


@lru_cache(maxsize=64)  # A dataset's files share a header, and parsing it is slower than reading.
def npy_header(head: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Parse a .npy header: shape, Fortran order, dtype. Raises BadFileError for damage."""
    file = io.BytesIO(head)
    try:
        version = np.lib.format.read_magic(file)
        read = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        found: tuple[tuple[int, ...], bool, np.dtype[Any]] = read(file)
    except Exception as error:  # The header is a Python literal; parsing raises SyntaxError etc.
        raise BadFileError(DAMAGED.format(".npy")) from error
    return found


def check_unpacked(file: Path | io.BytesIO, size: int) -> None:
    """Raise ValueError for a zip that unpacks to more than its size; torch.save writes none."""
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > size:
                raise ValueError("it is compressed")


def read_pt(data: bytearray) -> Tensor:
    """Read the tensor of a .pt file, or its entry `latent`, with weights_only=True.

    Raises BadFileError for damage, other objects, or a tensor that is not dense.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of pickle protocols.
            check_unpacked(io.BytesIO(data), len(data))
            loaded = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise BadFileError(
            "not a .pt file of plain tensors: damaged, or it holds objects whose loading could run "
            "code (they are never loaded)"
        ) from error
    except Exception as error:  # torch.load raises any exception on a damaged file.
        raise BadFileError(DAMAGED.format(".pt")) from error
    if isinstance(loaded, dict):
        loaded = only(loaded)
    if not isinstance(loaded, Tensor):
        raise BadFileError(f"holds a {type(loaded).__name__}, not a tensor")
    plain = loaded.layout == torch.strided and not (loaded.is_quantized or loaded.is_nested)
    if not plain or loaded.device.type != "cpu":
        raise BadFileError("holds a tensor that is not dense: sparse, nested, quantized or meta")
    if loaded.nbytes > len(data):
        raise BadFileError("holds a view that is larger than the file")
    # numpy does not support torch's lazy neg and conj bits.
    return loaded.detach().resolve_neg().resolve_conj()


def read_safetensors(data: bytearray) -> Tensor:
    """Read the tensor `latent` of a .safetensors file, or its only tensor.

    Raises BadFileError for damage.
    """
    try:
        table = safetensors.load(bytes(data))
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise BadFileError(DAMAGED.format(".safetensors")) from error
    tensor: Tensor = only(table)
    return tensor


def only(table: dict[Any, Any]) -> Any:
    """Return the entry `latent`, or the only entry.

    Raises BadFileError if there are none or several others.
    """
    key = "latent" if "latent" in table else next(iter(table), None)
    if not table or (key != "latent" and len(table) != 1):
        names = ", ".join(sorted(map(str, table))[:4])
        raise BadFileError(f'holds {len(table)} entries ({names}), none of them "latent"')
    return table[key]
