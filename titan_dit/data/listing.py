"""List an unpacked dataset: its layout, its files in order, their labels and classes.

The error for a path without a dataset says what the path holds.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import count, islice, pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from titan_dit.config.section import UserError, few
from titan_dit.data.files import LABEL_LIMIT, LATENT_SUFFIXES, BadFileError, read_label
from titan_dit.data.manifest import CLAIM, MANIFEST, SHARD_FORMATS, read_folder_manifest, read_json
from titan_dit.system import stdio
from titan_dit.system.launched_as import LaunchedAs
from titan_dit.system.progress import ProgressLine

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
SUPPORTED = (
    f"Supported: a folder per class of latents ({', '.join(LATENT_SUFFIXES)}) or, for `data pack`, "
    f"of pictures ({', '.join(IMAGE_SUFFIXES)}); fast-DiT's features and labels; shards of "
    "`data pack`. See docs/data.md"
)
PLACE = "[data] path="
"""Beginning of an error, before a path."""
MAX_ENTRIES = 1000
"""Maximum entries of a folder that are examined."""
NO = "not supported yet"
ENCODED = f"{NO}; of pictures `data encode` makes a dataset"
CIFAR = r"(data|test)_batch(_\d)?|batches\.meta|meta"
# Patterns of file names, the first match wins -> what it is, and what to do.
OTHER_KINDS = (
    (r"model_index\.json|diffusion_pytorch_model.*", "a diffusers model", "not a dataset"),
    (r"metrics\.jsonl|step-\d{8,}", "a run of titan_dit", "give the [data] path of its config"),
    (r".*\.tar", "a tar archive (webdataset)", ENCODED),
    (r".*\.(tar\.\w+|tgz)", "a tar archive (webdataset)", f"{NO}: unpack it"),
    (r".*\.(zip|7z|rar)", "a packed archive", f"{NO}: unpack it"),
    (r".*\.parquet", "a table", ENCODED),
    (r".*\.(arrow|tfrecords?|lance|csv|tsv|jsonl?)|dataset_info\.json", "a table", NO),
    (r".*\.(idx|bin)|.*[-.]idx\d-ubyte(\.gz)?", "an indexed binary file", NO),
    (r".*\.(h5|hdf5|mdb|lmdb|npz|mat|beton)", "an array file or database", NO),
    (rf".*\.(pkl|pickle|ckpt|pth)|{CIFAR}", "a pickle", f"{NO}, since opening it can run code"),
    (r".*\.(mp4|mkv|mov|avi|webm|gif|m4v|mpe?g)", "a video", NO),
    (r".*\.(tiff?|heic|avif|jp2|svg|ppm|exr|raw|dng)", "a picture of another format", NO),
    (r".*\.(mp3|wav|flac|ogg)", "a sound", NO),
)
SPLITS = ("train", "training", "val", "valid", "validation", "test")


def kind_of(name: str) -> str | None:
    """A phrase about a file name of a known kind: its kind, and why it is refused. Else None."""
    for pattern, what, why in OTHER_KINDS:
        if re.fullmatch(pattern, name, re.IGNORECASE):
            return f"{what}: {why}"
    return None


def is_folder(entry: os.DirEntry[str]) -> bool:
    """True for a folder or a link to one; False for a link in a circle."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def check_path(root: Path, where: str = PLACE) -> None:
    """Raise UserError, one line, unless `root` is a folder that may be a dataset.

    `where` names the flag or key in errors.
    """
    if not root.exists():
        raise UserError(f"{where}{root}: no such folder. Give the folder of a dataset.")
    if not root.is_dir():
        raise not_supported(root, f"it is {kind_of(root.name) or sample(root.name)}", where)
    with os.scandir(root) as found:
        entries = [(e.name, is_folder(e)) for e in islice(found, MAX_ENTRIES) if e.name[0] != "."]
    names = sorted(name for name, _ in entries)
    if not names:
        raise UserError(f"{where}{root}: no dataset found: the folder is empty. {SUPPORTED}.")
    if any(re.fullmatch(OTHER_KINDS[0][0], name) for name in names):
        raise not_supported(root, f"it holds {kind_of('model_index.json')}", where)
    is_run = "config.toml" in names and ("metrics.jsonl" in names or "checkpoints" in names)
    if is_run or any(re.match(r"step-\d{8,}", name) for name in (*names, root.resolve().name)):
        raise not_supported(root, f"it is {kind_of('metrics.jsonl')}", where)
    folders = sorted(name for name, is_dir in entries if is_dir)
    splits = [name for name in folders if name.lower() in SPLITS]
    if splits and splits == folders and any(path.is_dir() for path in (root / splits[0]).iterdir()):
        raise UserError(
            f"{where}{root} holds {', '.join(splits)}, not classes. Give one of them, such as "
            f"{root / splits[0]}."
        )


def not_found(root: Path, files: Sequence[str], marks: str) -> UserError:
    """The error for a folder without subfolders; `files` are its files, `marks` what is missing."""
    suffixes = Counter(os.path.splitext(name)[1] for name in files)  # noqa: PTH122 - as spelled.
    own = [s for s in suffixes if s.lower() in (*LATENT_SUFFIXES, *IMAGE_SUFFIXES)]
    if own:
        folder = shlex.quote(str(root))
        what = " ".join(f"{folder}/*{suffix}" for suffix in own)
        kind = "picture" if own[0].lower() in IMAGE_SUFFIXES else "latent"
        num = sum(suffixes[suffix] for suffix in own)
        kind += "s" if num > 1 else ""
        return UserError(
            f"[data] path={root}: no dataset found: {num:,} {kind} outside of class folders. Put "
            f"them into one class folder: mkdir {folder}/0 && mv {what} {folder}/0/ (or into one "
            "for each class). See docs/data.md."
        )
    for name in files:
        if found := kind_of(name):
            return not_supported(root, f"{name} is {found}")
    beside = f" It holds {', '.join(files[:4])}." if files else ""
    return UserError(f"[data] path={root}: no dataset found: {marks}.{beside} {SUPPORTED}.")


def sample(name: str) -> str:
    """A phrase for a single file that is given in place of a dataset."""
    suffix = Path(name).suffix.lower()
    if suffix in IMAGE_SUFFIXES:
        return "a single picture, but a dataset is a folder per class"
    if suffix in LATENT_SUFFIXES:
        return "a single file of latents, but a dataset is a folder with one file per latent"
    return "a file, but a dataset is a folder"


def not_supported(root: Path, what: str, where: str = PLACE) -> UserError:
    """The error for a recognised kind that is not supported."""
    return UserError(f"{where}{root}: {what}. {SUPPORTED}.")


MANY_LABELS = 20_000


def number_classes(
    root: Path, folders: list[str], classes: Sequence[str] | None, gaps: bool
) -> dict[str, int]:
    """Class folder -> label. `gaps` allows labels without a folder.

    Raises UserError for folders that are no classes, or missing ones.
    """
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
            raise UserError(
                f"[data] path={root}: {few(large)} is too large for a class number, which is below "
                f"{LABEL_LIMIT:,}. Rename the folder."
            )
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
    """Raise UserError if only some folders have numeric names: a stray one would shift labels."""
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
    """Return `num_classes`, or `found` if unset.

    Raises UserError for `num_classes` below `found`.
    """
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
    """Read label files, about 20 s per million; threads would not be faster.

    Raises UserError for one that is no label.
    """
    if len(paths) > MANY_LABELS and LaunchedAs.here().is_first:
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


def brief(value: object) -> str:
    """A number, or the first names of a list, as text."""
    return few(value) if isinstance(value, tuple) else str(value)


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
    """Names in label order; empty if the class folders are numbers."""


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

    With `num_classes`, classes may be missing. `classes` are names of class folders in label order.
    Raises UserError for shards, or if the manifest differs.
    """
    layout = layout_of(root)
    if layout == "shards":
        raise UserError(f"[data] path={root}: already packed into shards. Train on it as it is.")
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
    """List one folder per class; labels follow `classes`, else numeric names, else sorted order.

    Raises UserError for other files, an empty folder, or two kinds of data.
    """
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
    """List fast-DiT's features and labels, matched by file name.

    Raises UserError for a file without a partner.
    """
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
        raise UserError(f"[data] path={root}: {features} is empty. Put one file per latent there.")
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
        visible = [(is_folder(entry), entry.name) for entry in found if entry.name[0] != "."]
    visible.sort()
    return [name for is_dir, name in visible if is_dir], [
        name for is_dir, name in visible if not is_dir
    ]


def list_files(folder: Path, kinds: dict[str, str]) -> list[str]:
    """List a folder's samples in natural order; add the first file of each kind to `kinds`.

    Raises UserError for other files or folders, or a sample twice.
    """
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
    """Return the matching (features, labels) folders. Raises UserError if one is missing."""
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
