"""Pictures in tar files, as webdataset stores them.

The files of a sample share their name up to its first dot: `0001.jpg` with `0001.cls` (a number or
a name), `0001.txt` (a caption) or `0001.json` (`label` and `text`, unless these have files).
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from titan_dit.config.section import UserError
from titan_dit.config.user_text import BadTextError, decode, parse_json
from titan_dit.data.class_labels import few
from titan_dit.data.files import BadFileError, stamp_of
from titan_dit.data.recognise import IMAGE_SUFFIXES
from titan_dit.data.tar_members import Member as TarMember
from titan_dit.data.tar_members import refuse_sparse
from titan_dit.pictures.picture_set import (
    Asked,
    Label,
    PictureSet,
    Stamp,
    caption_of,
    label_of,
    make_set,
    numbers_if_decimal,
)
from titan_dit.system.progress import ProgressLine

LABEL, TEXT, BOTH = ".cls", ".txt", ".json"
OTHER = "other"
"""Key of a picture whose suffix has two dots."""


class Member(NamedTuple):
    """A picture in a tar file."""

    file: int
    offset: int
    size: int


def open_tars(root: Path, files: Sequence[Path], asked: Asked) -> PictureSet:
    """List the samples of tar files, one after another. Reads headers and texts, not pictures."""
    samples = Samples(asked, f"{asked.where}{root}/")
    progress = ProgressLine(len(files), "tar files", what="listed")
    for number, file in enumerate(files):
        try:
            with tarfile.open(file, "r:", tarinfo=TarMember) as archive:
                for member in archive:
                    if member.isfile() or member.issym() or member.islnk():
                        samples.add(archive, member, number, file.relative_to(root))
        except UserError:
            raise
        except Exception as error:  # tarfile raises any exception on a damaged file.
            raise UserError(
                f"{asked.where}{file} is not a readable tar file ({error}). Compressed ones must "
                "be unpacked: gunzip."
            ) from None
        progress.add(1)
    progress.end()
    refuse_other_names(samples.found, f"{asked.where}{root}")
    found = {key: sample for key, sample in samples.found.items() if "picture" in sample}
    labels: list[Label] = [sample.get("label") for sample in found.values()]
    texts = [sample.get("text", "") for sample in found.values()]
    members: list[Member] = [sample["picture"] for sample in found.values()]
    descriptors = [os.open(file, os.O_RDONLY) for file in files]
    stamps = [stamp_of(file) for file in files]

    def read(row: int) -> bytes:
        member = members[row]
        asked.check_size(member.size)
        data = os.pread(descriptors[member.file], member.size, member.offset)
        if len(data) != member.size:
            raise BadFileError("cut off with its tar file")
        return data

    def stamp(row: int) -> Stamp:
        return stamps[members[row].file]

    kind = f"{len(files)} tar files"
    numbers = numbers_if_decimal(labels)
    return make_set(root, kind, list(found), numbers, texts, read, stamp, asked)


@dataclass
class Samples:
    """The samples of tar files, by the name of each."""

    asked: Asked
    where: str
    """Begins an error, before the tar file's name."""
    found: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(
        self, archive: tarfile.TarFile, member: tarfile.TarInfo, number: int, path: Path
    ) -> None:
        """Add a member of a tar file to its sample."""
        folder, _, name = member.name.rpartition("/")
        stem, dot, rest = name.partition(".")
        suffix = f"{dot}{rest}".lower()
        key = f"{path}:{folder}/{stem}" if folder else f"{path}:{stem}"
        at = f"{self.where}{path}: {member.name}"
        if suffix in IMAGE_SUFFIXES:
            refuse_sparse(member, at)
            sample = self.found.setdefault(key, {})
            if "picture" in sample:
                raise UserError(f"{at} is the second picture of {stem}.")
            if not member.isfile():
                raise UserError(
                    f"{at} is a link. Make the tar file with --dereference --hard-dereference."
                )
            sample["picture"] = Member(number, member.offset_data, member.size)
        elif suffix in (LABEL, TEXT, BOTH):
            said = described(suffix, self.text_of(archive, member, at), at)
            sample = self.found.setdefault(key, {})
            # In whatever order they come.
            sample.update({**said, **sample} if suffix == BOTH else said)
        elif suffix.endswith(IMAGE_SUFFIXES) and stem:
            self.found.setdefault(key, {})[OTHER] = f"{path}: {member.name}"

    def text_of(self, archive: tarfile.TarFile, member: tarfile.TarInfo, at: str) -> str:
        """The text of a member, or of what it is a link to."""
        refuse_sparse(member, at)
        most = self.asked.max_text_bytes
        try:
            opened = archive.extractfile(member)
            data = opened.read(most + 1) if opened else b""
        except (KeyError, RecursionError):
            raise UserError(f"{at} is a link to nothing, or to itself. Correct it.") from None
        if len(data) > most:
            fix = self.asked.fix("--max-text-bytes")
            raise UserError(f"{at} is longer than {most:,} bytes. {fix}")
        try:
            return decode(data).strip()
        except BadTextError as error:
            raise UserError(f"{at} is {error}. Save it as UTF-8.") from None


def refuse_other_names(samples: Mapping[str, Mapping[str, Any]], where: str) -> None:
    """Raise UserError for pictures alone whose name has a dot before the suffix: `a.5.jpg`.

    Beside the picture of a sample they are another kind of it: `a.mask.png` beside `a.jpg`.
    """
    alone = [x[OTHER] for x in samples.values() if OTHER in x and "picture" not in x]
    if alone:
        raise UserError(
            f"{where}: {few(alone)} would not be read: in tar files a sample's name ends at the "
            "first dot. Rename such pictures, or unpack the files into a folder for each class."
        )


def described(suffix: str, content: str, at: str) -> dict[str, Any]:
    """The label and the caption in a text beside a picture, as far as it has them."""
    label: Label = None
    text = ""
    if suffix == LABEL:
        return {"label": label_of(content, at)}
    if suffix == TEXT:
        return {"text": content}
    try:
        values = parse_json(content, unique=True)
    except BadTextError as error:
        raise UserError(f"{at} is {error}.") from None
    if isinstance(values, dict):
        labels = (label_of(values.get(key), at) for key in ("label", "class"))
        label = next((found for found in labels if found is not None), None)
        texts = (caption_of(values.get(key), at) for key in ("text", "caption"))
        text = next(filter(None, texts), "")
    return ({} if label is None else {"label": label}) | ({"text": text} if text else {})
