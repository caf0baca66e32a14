"""Number the classes of an unpacked dataset, read its label files, name missing classes."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from itertools import count, islice, pairwise
from pathlib import Path

import torch
from jaxtyping import Int64
from torch import Tensor

from titan_dit.config.section import UserError
from titan_dit.data.files import LABEL_LIMIT, BadFileError, read_label
from titan_dit.data.manifest import MANIFEST
from titan_dit.system import stdio
from titan_dit.system.progress import ProgressLine

MANY_LABELS = 20_000


def number_classes(
    root: Path, folders: list[str], classes: Sequence[str] | None, gaps: bool
) -> dict[str, int]:
    """Map class folders to labels; `gaps` allows labels without a folder."""
    if classes is not None:
        if unknown := sorted(set(folders) - set(classes)):
            raise UserError(
                f"[data] path={root}: the folders {few(unknown)} are not among the {len(classes)} "
                "listed classes. Add them to the list, or move them elsewhere."
            )
        numbers = {name: label for label, name in enumerate(classes) if name in set(folders)}
        missing: Sequence[object] = [name for name in classes if name not in numbers]
        num_missing = len(missing)
    elif all(name.isdecimal() for name in folders):
        numbers = {name: int(name) for name in folders}
        if large := [name for name in folders if numbers[name] >= LABEL_LIMIT]:
            raise UserError(f"[data] path={root}: {few(large)} is too large for a class number.")
        by_label = sorted(folders, key=int)
        for name, after in pairwise(by_label):
            if int(name) == int(after):
                raise UserError(
                    f"[data] path={root}: the folders {name} and {after} are both class "
                    f"{int(name)}. Merge them."
                )
        num_missing, missing = missing_below(numbers.values())
    else:
        refuse_mixture(root, folders)
        numbers, missing = {name: label for label, name in enumerate(sorted(folders))}, []
        num_missing = 0
    if num_missing and not gaps:
        raise missing_error(root, num_missing, missing)
    return numbers


def refuse_mixture(root: Path, folders: list[str]) -> None:
    """Refuse folders of which only some have numeric names: a stray one would shift labels."""
    by_number = [name for name in folders if name.isdecimal()]
    by_name = [name for name in folders if not name.isdecimal()]
    if by_number and by_name:
        odd, others = sorted((by_number, by_name), key=len)
        what = "names" if odd is by_number else "numbers"
        raise UserError(
            f"[data] path={root}: most class folders are {what} ({few(others)}), but {few(odd)} is "
            "not. Move it elsewhere; if all are names, list them "
            f'in label order: "classes" in {MANIFEST}, or `data pack --classes FILE`.'
        )


def enough_classes(root: Path, found: int, num_classes: int | None) -> int:
    """Return `num_classes`, or `found` if unset; refuses `num_classes` below `found`."""
    if num_classes is not None and found > num_classes:
        raise UserError(
            f"[data] path={root}: num_classes={num_classes}, but there are {found} classes (0 to "
            f"{found - 1}). Set it to {found}, or move the others elsewhere."
        )
    return num_classes or found


def missing_below(labels: Collection[int]) -> tuple[int, list[int]]:
    """Count the missing classes below the highest label, and list at most four of them."""
    found = set(labels)
    num = max(found) + 1 - len(found)
    return num, list(islice((label for label in count() if label not in found), min(num, 4)))


def missing_error(root: Path, num: int, first: Sequence[object]) -> UserError:
    """Return the error for classes without samples."""
    return UserError(
        f"[data] path={root}: no samples of {num:,} classes: {few(first, total=num)}. Add them. "
        "If they are missing on purpose, set the number of classes: "
        f'"num_classes" in {MANIFEST}, or --num-classes of `data pack` or `data encode`.'
    )


def read_labels(paths: list[Path]) -> Int64[Tensor, " n"]:
    """Read label files, about 20 s per million; threads would not be faster."""
    if len(paths) > MANY_LABELS and os.environ.get("RANK", "0") == "0":
        stdio.write(
            sys.stderr,
            f"reading {len(paths):,} label files in {paths[0].parent}; shards open without this "
            "delay: `python -m titan_dit data pack`\n",
        )
    labels, progress = [], ProgressLine(len(paths), "labels", what="read")
    for path in paths:
        try:
            labels.append(read_label(path))
            if len(labels) % 1000 == 0:
                progress(len(labels))
        except BadFileError as error:
            raise UserError(f"[data] {path}: {error}. Fix or replace the file.") from None
    progress.end()
    return torch.tensor(labels)


def few(names: Sequence[object], num: int = 4, total: int | None = None) -> str:
    """Format the first `num` of `names`, and how many of `total` (default: `names`) are left."""
    shown, total = ", ".join(str(name) for name in names[:num]), total or len(names)
    return shown if total <= num else f"{shown} and {total - num:,} more"


def brief(value: object) -> str:
    """Format a number, or the first names of a list."""
    return few(value) if isinstance(value, tuple) else str(value)
