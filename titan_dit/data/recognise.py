"""What a path holds that is no dataset: its name, and what to do with it.

One table for `[data] path`, `data pack --input` and `data show`.
"""

from __future__ import annotations

import os
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from titan_dit.config.section import UserError
from titan_dit.data.files import LATENT_SUFFIXES

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
SUPPORTED = (
    f"Supported: a folder per class of latents ({', '.join(LATENT_SUFFIXES)}) or, for `data pack`, "
    f"of pictures ({', '.join(IMAGE_SUFFIXES)}); fast-DiT's features and labels; shards of "
    "`data pack`. See docs/data.md"
)
PLACE = "[data] path="
"""Begins an error, before a path."""
MOST = 1000
"""Entries of a folder that are looked at."""
NO = "not supported yet"
ENCODED = f"{NO}; of pictures `data encode` makes a dataset"
CIFAR = r"(data|test)_batch(_\d)?|batches\.meta|meta"
# Patterns of file names, the first match wins -> what it is, and what to do.
KINDS = (
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
    """What a file with this name is and why it is refused; None if it is not known."""
    for pattern, what, why in KINDS:
        if re.fullmatch(pattern, name, re.IGNORECASE):
            return f"{what}: {why}"
    return None


def check_path(root: Path, where: str = PLACE) -> None:
    """Raise UserError unless `root` is a folder that may be a dataset. One line.

    `where` names the flag or key in errors.
    """
    if not root.exists():
        raise UserError(f"{where}{root}: no such folder. Give the folder of a dataset.")
    if not root.is_dir():
        raise not_supported(root, f"it is {kind_of(root.name) or sample(root.name)}", where)
    with os.scandir(root) as found:
        entries = [(e.name, e.is_dir()) for e in islice(found, MOST) if e.name[0] != "."]
    names = sorted(name for name, _ in entries)
    if not names:
        raise UserError(f"{where}{root}: no dataset found: the folder is empty. {SUPPORTED}.")
    if any(re.fullmatch(KINDS[0][0], name) for name in names):
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
    """The error for a folder without subfolders; `files` are its files, `marks` what it lacks."""
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
    """What a single file is, if it could be a sample or has no known kind."""
    suffix = Path(name).suffix.lower()
    if suffix in IMAGE_SUFFIXES:
        return "a single picture, but a dataset is a folder per class"
    if suffix in LATENT_SUFFIXES:
        return "a single file of latents, but a dataset is a folder with one file per latent"
    return "a file, but a dataset is a folder"


def not_supported(root: Path, what: str, where: str = PLACE) -> UserError:
    """The error for what is recognised."""
    return UserError(f"{where}{root}: {what}. {SUPPORTED}.")
