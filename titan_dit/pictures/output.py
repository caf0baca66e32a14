"""Files of drawn pictures: a PNG each, or one .npz as ADM's evaluator reads it."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO

import numpy as np
from jaxtyping import Int64, UInt8
from PIL import Image
from torch import Tensor

from titan_dit.system.files import replacing, replacing_folder

METADATA = "metadata.jsonl"
DATE = (1980, 1, 1, 0, 0, 0)
"""Of the arrays in a .npz: equal pictures are equal bytes."""


def write_folder(
    path: Path,
    batches: Iterable[UInt8[Tensor, "b h w 3"]],
    labels: Sequence[int],
    names: Sequence[str],
) -> None:
    """Write 000000.png, 000001.png ... and `metadata.jsonl` with each one's label.

    The folder appears when it is whole. `data encode` reads it.
    """
    lines, number = [], 0
    with replacing_folder(path) as aside:
        for batch in batches:
            for pixels in batch.numpy():
                file = f"{number:06d}.png"
                Image.fromarray(pixels).save(aside / file)
                label = labels[number]
                line = {"file_name": file, "label": label}
                if 0 <= label < len(names):
                    line["class"] = names[label]
                lines.append(json.dumps(line, ensure_ascii=False))
                number += 1
        (aside / METADATA).write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_npz(
    path: Path,
    batches: Iterable[UInt8[Tensor, "b h w 3"]],
    labels: Int64[Tensor, " n"],
    shape: tuple[int, int, int, int],
) -> None:
    """Write `arr_0`, uint8 [n, h, w, 3], and `arr_1`, the labels (arXiv:2105.05233's evaluator).

    Batches are written one by one: the pictures need not fit into memory.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        replacing(path) as aside,
        zipfile.ZipFile(aside, "w", allowZip64=True) as archive,
    ):
        with archive.open(entry("arr_0"), "w", force_zip64=True) as file:
            write_header(file, shape, np.dtype(np.uint8))
            for batch in batches:
                file.write(batch.contiguous().numpy().tobytes())
        with archive.open(entry("arr_1"), "w") as file:
            write_header(file, (len(labels),), np.dtype(np.int64))
            file.write(labels.numpy().tobytes())


def entry(name: str) -> zipfile.ZipInfo:
    """An array of a .npz, not compressed."""
    return zipfile.ZipInfo(f"{name}.npy", DATE)


def write_header(file: IO[bytes], shape: tuple[int, ...], dtype: np.dtype) -> None:
    """The header of a .npy file."""
    described = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False}
    np.lib.format.write_array_header_1_0(file, {**described, "shape": shape})
