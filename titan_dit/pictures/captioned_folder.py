"""A folder of captioned pictures or clips: NAME.txt beside NAME.jpg or NAME.mp4, at any depth.

It is the layout of the tools for fine-tuning. Its folders are no classes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from titan_dit.config import user_text
from titan_dit.config.section import UserError, few, show
from titan_dit.config.user_text import BadTextError
from titan_dit.data.files import BadFileError, open_regular, read_whole, stamp_of
from titan_dit.data.listing import IMAGE_SUFFIXES, is_folder, kind_of, natural, suffix_of
from titan_dit.data.manifest import CLAIM, MANIFEST
from titan_dit.pictures import clips
from titan_dit.pictures.picture_set import (
    Caption,
    ListingOptions,
    PictureSet,
    Stamp,
    is_empty,
    make_set,
)

CAPTION = ".txt"


@dataclass(frozen=True)
class FolderFiles:
    """The files of a folder and of all folders below it, by their paths relative to it."""

    pictures: tuple[str, ...]
    """In natural order: a/2.jpg before a/10.jpg."""
    texts: frozenset[str]
    """Files that end in .txt."""
    others: tuple[str, ...]

    @property
    def captions(self) -> dict[str, str]:
        """Picture -> its caption's file; pictures without one are left out."""
        of_stem = {stem_of(name): name for name in sorted(self.texts)}
        stems = ((name, stem_of(name)) for name in self.pictures)
        return {name: of_stem[stem] for name, stem in stems if stem in of_stem}

    @property
    def is_captioned(self) -> bool:
        """True for captions beside pictures, and if it is not a folder for each class.

        False for a dataset of shards with pictures beside them.
        """
        if MANIFEST in self.others or CLAIM in self.others:
            return False
        is_sorted = all(name.count("/") == 1 for name in self.pictures)
        return bool(self.captions) or not is_sorted or any(map(is_video, self.pictures))


def stem_of(name: str) -> str:
    """A file's path without its suffix."""
    return name[: len(name) - len(suffix_of(name))]


def is_video(name: str) -> bool:
    """True for a file that is a video by its name."""
    return suffix_of(name) in clips.SUFFIXES


def files_of(root: Path, with_videos: bool = False) -> FolderFiles:
    """List a folder and all below it, without hidden files. Each folder is read once.

    `with_videos`: videos are among the pictures. Raises UserError for a folder that cannot be read.
    """
    try:
        names = list(walk(root, "", set()))
    except OSError as error:
        raise UserError(
            f"[data encode] {error.filename} cannot be read: {error.strerror}. Restore it, or "
            "remove it."
        ) from None
    suffixes = (*IMAGE_SUFFIXES, *clips.SUFFIXES) if with_videos else IMAGE_SUFFIXES
    pictures = [name for name in names if suffix_of(name) in suffixes]
    texts = frozenset(name for name in names if suffix_of(name) == CAPTION)
    others = [name for name in names if suffix_of(name) not in (*suffixes, CAPTION)]
    return FolderFiles(tuple(sorted(pictures, key=by_parts)), texts, tuple(sorted(others)))


def by_parts(name: str) -> list[tuple[list[str | int], str]]:
    """Sort key: natural order in each folder."""
    return [natural(part) for part in name.split("/")]


def walk(root: Path, below: str, seen: set[tuple[int, int]]) -> Iterator[str]:
    """Yield the files of a folder and all below it. A link to a folder above it is no loop."""
    about = (root / below).stat()
    if (about.st_dev, about.st_ino) in seen:
        return
    seen.add((about.st_dev, about.st_ino))
    with os.scandir(root / below) as found:
        entries = sorted((e.name, is_folder(e)) for e in found if e.name[0] != ".")
    for name, is_dir in entries:
        path = f"{below}/{name}" if below else name
        if is_dir:
            yield from walk(root, path, seen)
        else:
            yield path


def open_captioned(root: Path, files: FolderFiles, asked: ListingOptions) -> PictureSet:
    """List the pictures with their captions.

    Raises UserError for two pictures, or two captions, of one name.
    """
    where = f"{asked.where}{root}"
    if asked.classes:
        raise UserError(
            f"[data encode] classes: {root} holds captioned pictures, whose folders are no "
            "classes. Leave --classes out, or give labels and captions in metadata.jsonl."
        )
    for names in (files.pictures, sorted(files.texts)):
        first: dict[str, str] = {}
        for name in names:
            if (other := first.setdefault(stem_of(name), name)) != name:
                raise UserError(f"{where}: {other} and {name} are the same sample. Keep one.")
    captions = files.captions
    texts = [read_caption(root, captions.get(name), asked) for name in files.pictures]

    path, read, stamp = files_at(root, files.pictures, asked)
    return make_set(
        root,
        asked,
        kind="a folder of captioned pictures",
        names=files.pictures,
        labels=[None] * len(files.pictures),
        texts=texts,
        read=read,
        stamp=stamp,
        captioned=True,
        beside=beside(files, set(captions.values())),
        path=path,
    )


def files_at(
    root: Path, names: Sequence[str], asked: ListingOptions
) -> tuple[Callable[[int], Path], Callable[[int], bytes], Callable[[int], Stamp]]:
    """(path, read, stamp) of a PictureSet whose pictures are files of these names."""

    def path(row: int) -> Path:
        return root / names[row]

    def read(row: int) -> bytes:
        return bytes(read_whole(path(row), asked.check_size))

    return path, read, lambda row: stamp_of(path(row))


def read_caption(root: Path, name: str | None, asked: ListingOptions) -> str:
    """The caption in a file, without blanks at its ends; "" without a file. Raises UserError."""
    if name is None:
        return ""
    at, most = f"{asked.where}{root / name}", asked.max_text_bytes
    try:
        with open_regular(root / name) as opened:
            data = opened.read(most + 1)
        if len(data) > most:
            raise UserError(f"{at} is longer than {most:,} bytes. {asked.fix('--max-text-bytes')}")
        return user_text.decode(data).strip()
    except OSError as error:
        raise UserError(f"{at} cannot be read: {error.strerror}.") from None
    except BadFileError as error:
        raise UserError(f"{at} is {error}. Remove it.") from None
    except BadTextError as error:
        raise UserError(f"{at} is {error}. Save it as UTF-8.") from None


def beside(files: FolderFiles, used: set[str]) -> Sequence[tuple[str, str]]:
    """(name, reason) of each file that is neither a picture nor a picture's caption."""
    unused = [(name, "a caption without a picture") for name in sorted(files.texts - used)]
    others = [(name, reason_of(name)) for name in files.others]
    return [*unused, *others]


def reason_of(name: str) -> str:
    """Why a file is not read."""
    if is_video(name):
        return "a video, of which --frames makes clips"
    return (kind_of(name.rpartition("/")[2]) or "not a picture").partition(":")[0]


def with_prefix(pictures: PictureSet, asked: ListingOptions) -> PictureSet:
    """Put the prefix in front of every caption. Raises UserError if there are none."""
    prefix = asked.caption_prefix
    if not prefix:
        return pictures
    alone = prefix.rstrip(" ,") if asked.no_caption == "empty" else ""

    def prefixed(text: Caption) -> Caption:
        if is_empty(text):
            return alone
        return prefix + text if isinstance(text, str) else tuple(prefix + one for one in text)

    texts = [prefixed(text) for text in pictures.texts or [""] * len(pictures)]
    if not any(texts):
        raise UserError(
            f"[data encode] --caption-prefix {show(prefix)}: the pictures have no captions. To "
            "give all of them the prefix alone, add --no-caption empty."
        )
    return replace(pictures, texts=texts)


def apply_caption_rule(pictures: PictureSet, asked: ListingOptions) -> PictureSet:
    """Raise UserError for pictures without a caption, or leave them out, or keep them.

    Raised only if captions are all that the pictures have: labels may stand alone.
    """
    texts = pictures.texts or [""] * len(pictures)
    missing = [row for row, text in enumerate(texts) if is_empty(text)]
    if not missing or asked.no_caption == "empty":
        return pictures
    if asked.no_caption == "skip":
        return pictures.without(missing, "no caption")
    if not pictures.captioned:
        return pictures
    names = few([pictures.names[row] for row in missing])
    fix = "Add it (NAME.txt beside NAME.jpg), or choose --no-caption skip or --no-caption empty"
    if not any(texts):
        has_videos = any(map(is_video, pictures.names))
        of_pictures = "For classes, make a folder for each one"
        fix += ". Folders of videos are no classes" if has_videos else f". {of_pictures}"
    what = "files" if asked.clips else "pictures"
    raise UserError(
        f"{asked.where}{pictures.root}: {len(missing):,} of {len(pictures):,} {what} have no "
        f"caption: {names}. {fix}."
    )
