"""List an unpacked dataset: its layout, its files in order, and their labels.

Layouts: a folder per class, or fast-DiT's pair of folders `features` and `labels` (or
`NAME_features` and `NAME_labels`) with equal file names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from titan_dit.config.section import UserError
from titan_dit.data.class_labels import (
    brief,
    enough_classes,
    few,
    missing_below,
    missing_error,
    number_classes,
    read_labels,
)
from titan_dit.data.files import LATENT_SUFFIXES
from titan_dit.data.manifest import CLAIM, MANIFEST, SHARD_FORMATS, read_folder_manifest, read_json
from titan_dit.data.recognise import (
    IMAGE_SUFFIXES,
    SUPPORTED,
    check_path,
    kind_of,
    not_found,
    not_supported,
)

Layout = Literal["shards", "pair", "classes"]
KINDS = dict.fromkeys(LATENT_SUFFIXES, "latents") | dict.fromkeys(IMAGE_SUFFIXES, "images")


class Names(Sequence[str]):
    """Relative paths, stored in one block of bytes.

    A list of str takes twice the memory, and again in every forked worker: reading an object
    writes its reference count, which copies its page.
    """

    def __init__(self, names: Iterable[str]) -> None:
        encoded = [os.fsencode(name) for name in names]
        self.ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
        self.block = b"".join(encoded)

    def __len__(self) -> int:
        """Number of paths."""
        return len(self.ends) - 1

    def __getitem__(self, index: int) -> str:  # type: ignore[override]
        """Return path `index`; a negative index counts from the end."""
        index += len(self) if index < 0 else 0
        if not 0 <= index < len(self):
            raise IndexError(f"name {index} of {len(self)}")
        return os.fsdecode(self.block[self.ends[index] : self.ends[index + 1]])


@dataclass(frozen=True)
class Listing:
    """The files of an unpacked dataset; file i is row i."""

    root: Path
    layout: Layout
    kind: str
    """"latents" or "images"."""
    names: Names
    """File paths relative to `root`."""
    labels: Int64[Tensor, " n"]
    num_classes: int
    class_names: tuple[str, ...]
    """In label order; empty if the class folders are numbers."""


def layout_of(root: Path) -> Layout:
    """Detect the layout of a folder; raises UserError if it holds no dataset or two of them."""
    check_path(root)
    folders, files = entries(root)
    pairs = pairs_of(root, folders)
    others = [name for name in folders if not any(name in pair for pair in pairs)]
    if CLAIM in files and MANIFEST not in files:
        encoding = b"data encode" in (root / CLAIM).read_bytes()
        command, what = ("data encode", "encoding") if encoding else ("data pack", "packing")
        raise UserError(
            f"[data] path={root}: {what} is unfinished. Run the same `{command}` command again "
            "to resume it."
        )
    found = [f"the pair {' and '.join(pair)}" for pair in pairs]
    if read_json(root).get("format") in SHARD_FORMATS:
        others = [name for name in others if holds_samples(root / name)]
        found.append(f"the shards of {MANIFEST}")
    if others:
        found.append(f"the class folders {few(others)}")
    if len(found) > 1:
        raise UserError(
            f"[data] path={root} holds {' and '.join(found)}: two datasets in one folder. Move "
            "each to its own folder."
        )
    if not found:
        marks = f"neither a {MANIFEST} of shards, nor a folder per class, nor features and labels"
        raise not_found(root, files, marks)
    return "classes" if others else "pair" if pairs else "shards"


def list_folder(
    root: Path, num_classes: int | None = None, classes: Sequence[str] | None = None
) -> Listing:
    """List an unpacked folder; unset arguments default to its manifest's values.

    With `num_classes`, classes may be missing. `classes` are the class folder names in label order.
    """
    layout = layout_of(root)
    if layout == "shards":
        raise UserError(f"[data] path={root}: already packed into shards.")
    manifest = read_folder_manifest(root)
    for key, wanted in (
        ("num_classes", num_classes),
        ("classes", None if classes is None else tuple(classes)),
    ):
        if wanted is not None and manifest[key] not in (None, wanted):
            raise UserError(
                f"[data] path={root}: {key} is {brief(wanted)}, but {MANIFEST} says "
                f"{brief(manifest[key])}. Remove it, or correct the manifest."
            )
    num_classes = num_classes or manifest["num_classes"]
    classes = classes or manifest["classes"]
    if classes and num_classes and len(classes) != num_classes:
        raise UserError(
            f"[data] path={root}: num_classes={num_classes}, but classes lists {len(classes)} "
            "names. List the names of all classes in label order: --classes FILE, or "
            f'"classes" in {MANIFEST}.'
        )
    return (list_classes if layout == "classes" else list_pair)(root, num_classes, classes)


def list_classes(root: Path, num_classes: int | None, classes: Sequence[str] | None) -> Listing:
    """List one folder per class; labels follow `classes`, else numeric names, else sorted order."""
    folders, beside = entries(root)
    if beside := [name for name in beside if name != MANIFEST]:
        for name in entries(root / folders[0])[1]:
            if kind := kind_of(name):
                raise not_supported(root, f"{folders[0]}/{name} is {kind}")
        raise UserError(
            f"[data] path={root}: {few(beside)} is outside the class folders, so its class is "
            "unknown. Move it elsewhere, or into the folder of its class."
        )
    numbers = number_classes(root, folders, classes, gaps=num_classes is not None)
    names: list[str] = []
    labels: list[int] = []
    kinds: dict[str, str] = {}
    empty = []
    for folder in sorted(folders, key=numbers.__getitem__):
        files = list_files(root / folder, kinds)
        if not files:
            empty.append(folder)
        names += [f"{folder}/{file}" for file in files]
        labels += [numbers[folder]] * len(files)
    if empty:
        raise UserError(
            f"[data] path={root}: empty class folders: {few(empty)}. Fill or delete them."
        )
    if len(kinds) > 1:
        (kind, first), (other, second) = kinds.items()
        raise UserError(
            f"[data] path={root} holds {kind} ({first}) and {other} ({second}): two datasets in "
            "one folder. Move each to its own folder."
        )
    found = max(len(classes or ()), labels[-1] + 1)
    by_name = classes is not None or not all(name.isdecimal() for name in folders)
    if by_name and classes is None and num_classes not in (None, len(folders)):
        raise UserError(
            f"[data] path={root}: num_classes={num_classes}, but there are {len(folders)} named "
            f"class folders ({few(sorted(folders))}), so their labels are unknown. List the names "
            f'of all classes in label order: --classes FILE, or "classes" in {MANIFEST}.'
        )
    return Listing(
        root,
        "classes",
        next(iter(kinds)),
        Names(names),
        torch.tensor(labels),
        enough_classes(root, found, num_classes),
        tuple(classes or sorted(folders)) if by_name else (),
    )


def list_pair(root: Path, num_classes: int | None, classes: Sequence[str] | None) -> Listing:
    """List fast-DiT's features and labels, matched by file name."""
    features, label_folder = pairs_of(root, entries(root)[0])[0]
    files, label_files = list_files(root / features, {}), list_files(root / label_folder, {})
    label_of = {Path(name).stem: name for name in label_files}
    stems = {Path(name).stem for name in files}
    lone = [name for name in files if Path(name).stem not in label_of]
    lone_labels = [name for name in label_files if Path(name).stem not in stems]
    for folder, names, other in (
        (features, lone, label_folder),
        (label_folder, lone_labels, features),
    ):
        if names:
            raise UserError(
                f"[data] path={root}: {few([f'{folder}/{name}' for name in names])} has no file of "
                f"the same name in {other}. Add the missing files, or move the others elsewhere."
            )
    if not files:
        raise UserError(f"[data] path={root}: {features} is empty.")
    labels = read_labels([root / label_folder / label_of[Path(name).stem] for name in files])
    num_missing, missing = missing_below(labels.tolist())
    if num_missing and num_classes is None and classes is None:
        raise missing_error(root, num_missing, missing)
    found = max(len(classes or ()), int(labels.max()) + 1)
    if classes is not None and found > len(classes):
        raise UserError(
            f"[data] path={root}: found label {found - 1}, but only {len(classes)} classes are "
            "listed. Complete the list."
        )
    paths = Names(f"{features}/{name}" for name in files)
    num = enough_classes(root, found, num_classes)
    return Listing(root, "pair", "latents", paths, labels, num, tuple(classes or ()))


def entries(root: Path) -> tuple[list[str], list[str]]:
    """Return the sorted names of a folder's subfolders and files, without hidden ones."""
    with os.scandir(root) as found:
        visible = [(entry.is_dir(), entry.name) for entry in found if entry.name[0] != "."]
    visible.sort()
    return [name for is_dir, name in visible if is_dir], [
        name for is_dir, name in visible if not is_dir
    ]


def list_files(folder: Path, kinds: dict[str, str]) -> list[str]:
    """List a folder's samples in natural order; add the first file of each kind to `kinds`."""
    folders, files = entries(folder)
    strange = [*folders, *(name for name in files if suffix_of(name) not in KINDS)]
    if strange:
        if kind := next(filter(None, map(kind_of, strange)), None):
            raise UserError(f"[data] {folder}: {few(strange)}: {kind}. {SUPPORTED}.")
        if folders and not files:
            raise UserError(
                f"[data] {folder} holds the folders {few(folders)}, but a class is a folder of "
                f"files. If they are the classes, give {folder}."
            )
        raise UserError(
            f"[data] {folder}: {few(strange)} is neither a latent ({', '.join(LATENT_SUFFIXES)}) "
            f"nor an image ({', '.join(IMAGE_SUFFIXES)}). Move it elsewhere."
        )
    suffixes = {suffix_of(name): name for name in reversed(files)}
    for suffix, name in suffixes.items():
        kinds.setdefault(KINDS[suffix], f"{folder.name}/{name}")
    if len(suffixes) > 1:
        first: dict[str, str] = {}
        for name in files:
            stem = os.path.splitext(name)[0]  # noqa: PTH122 - a Path for each is slow.
            if (other := first.setdefault(stem, name)) != name:
                raise UserError(
                    f"[data] {folder}: {other} and {name} are the same sample. Keep one."
                )
    return sorted(files, key=natural)


def suffix_of(name: str) -> str:
    """Return a file name's suffix in lower case."""
    return name[name.rfind(".") :].lower()


def natural(name: str) -> tuple[list[str | int], str]:
    """Sort key for natural order: 2.npy before 10.npy."""
    parts: list[str | int] = list(re.split(r"(\d+)", name))
    parts[1::2] = map(int, parts[1::2])
    return parts, name


def pairs_of(root: Path, folders: list[str]) -> list[tuple[str, str]]:
    """Return the matching (features, labels) folders."""
    pairs = []
    for name in folders:
        for half, other in (("features", "labels"), ("labels", "features")):
            if name == half or name.endswith(f"_{half}"):
                partner = name.removesuffix(half) + other
                if partner not in folders:
                    raise UserError(f"[data] path={root}: found {name}, but no {partner}. Add it.")
                if half == "features":
                    pairs.append((name, partner))
    return pairs


def holds_samples(folder: Path) -> bool:
    """Return True if a folder contains a latent or an image."""
    return any(suffix_of(name) in KINDS for name in entries(folder)[1])
