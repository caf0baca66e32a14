"""Pictures in tar files, as webdataset writes them: members of one name are a sample.

The bytes of a picture are read when it is encoded; no member is unpacked to disk.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from titan_dit.config.section import UserError, few
from titan_dit.config.user_text import BadTextError, decode, parse_json
from titan_dit.data.files import BadFileError, stamp_of
from titan_dit.data.listing import (
    IMAGE_SUFFIXES,
)
from titan_dit.data.tar_members import BoundedMember, refuse_sparse
from titan_dit.pictures.companions import KINDS, check_references
from titan_dit.pictures.metadata import METADATA_TEXTS
from titan_dit.pictures.picture_set import (
    Caption,
    Label,
    ListingOptions,
    PictureSet,
    Stamp,
    first_caption,
    label_of,
    make_set,
    numbers_if_decimal,
)
from titan_dit.system.progress import ProgressLine

LABEL, TEXT, BOTH = ".cls", ".txt", ".json"
OTHER = "other"
"""Key, in a sample, of a picture whose suffix has two dots."""
PICTURE = "picture"
"""Key, in a sample, of its picture; KINDS are the keys of its reference and its mask."""
FORMS = {
    f"{before}{suffix}": kind
    for before, kind in (("", PICTURE), *((f".{kind}", kind) for kind in KINDS))
    for suffix in IMAGE_SUFFIXES
}
"""Suffix -> key in a sample."""


class TarPicture(NamedTuple):
    """A picture in a tar file, or a reference or a mask."""

    name: str
    file: int
    offset: int
    size: int


def open_tars(root: Path, files: Sequence[Path], asked: ListingOptions) -> PictureSet:
    """List the samples of tar files, one after another. Reads headers and texts, not pictures.

    Raises UserError.
    """
    samples = TarSamples(asked, f"{asked.where}{root}/")
    progress = ProgressLine(len(files), "tar files", what="listed")
    for number, file in enumerate(files):
        try:
            with tarfile.open(file, "r:", tarinfo=BoundedMember) as archive:
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
    found = {key: sample for key, sample in samples.found.items() if PICTURE in sample}
    labels: list[Label] = [sample.get("label") for sample in found.values()]
    texts = [sample.get("text", "") for sample in found.values()]
    members: list[dict[str, TarPicture]] = [
        {kind: sample[kind] for kind in (PICTURE, *KINDS) if kind in sample}
        for sample in found.values()
    ]
    descriptors = [os.open(file, os.O_RDONLY) for file in files]
    stamps = [stamp_of(file) for file in files]

    def read_member(kind: str, row: int) -> bytes:
        member = members[row][kind]
        asked.check_size(member.size)
        data = os.pread(descriptors[member.file], member.size, member.offset)
        if len(data) != member.size:
            raise BadFileError("cut off with its tar file")
        return data

    def read(row: int) -> bytes:
        return read_member(PICTURE, row)

    def stamp(row: int) -> Stamp:
        return stamps[members[row][PICTURE].file]

    pictures = make_set(
        root,
        asked,
        kind=f"{len(files)} tar files",
        names=list(found),
        labels=numbers_if_decimal(labels),
        texts=texts,
        read=read,
        stamp=stamp,
    )
    companions = {
        kind: {row: of_row[kind].name for row, of_row in enumerate(members) if kind in of_row}
        for kind in KINDS
    }
    check_references(f"{asked.where}{root}", pictures, companions["reference"])
    companions = {kind: names for kind, names in companions.items() if names}
    return replace(pictures, companions=companions, read_member=read_member)


@dataclass
class TarSamples:
    """The samples of tar files, by name."""

    asked: ListingOptions
    where: str
    """Beginning of an error, before the tar file's name."""
    found: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(
        self, archive: tarfile.TarFile, member: tarfile.TarInfo, number: int, path: Path
    ) -> None:
        """Add a member of a tar file to its sample. Raises UserError."""
        folder, _, name = member.name.rpartition("/")
        stem, dot, rest = name.partition(".")
        suffix = f"{dot}{rest}".lower()
        key = f"{path}:{folder}/{stem}" if folder else f"{path}:{stem}"
        at = f"{self.where}{path}: {member.name}"
        kind = FORMS.get(suffix)
        if kind == PICTURE or (kind and stem and not self.asked.gaps):
            refuse_sparse(member, at)
            sample = self.found.setdefault(key, {})
            if kind in sample:
                raise UserError(f"{at} is the second {kind} of {stem}. Keep one.")
            if not member.isfile():
                raise UserError(
                    f"{at} is a link. Make the tar file with --dereference --hard-dereference."
                )
            name = f"{path}:{member.name}"
            sample[kind] = TarPicture(name, number, member.offset_data, member.size)
        elif suffix in (LABEL, TEXT, BOTH):
            said = described(suffix, self.text_of(archive, member, at), at)
            sample = self.found.setdefault(key, {})
            # In whatever order they come.
            sample.update({**said, **sample} if suffix == BOTH else said)
        elif suffix.endswith(IMAGE_SUFFIXES) and stem:
            self.found.setdefault(key, {})[OTHER] = f"{path}: {member.name}"

    def text_of(self, archive: tarfile.TarFile, member: tarfile.TarInfo, at: str) -> str:
        """The text of a member, or of a link's target. Raises UserError."""
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
    """Raise UserError for a picture whose name has a dot before its suffix: `a.5.jpg`.

    Beside the sample's own picture it is allowed: `a.depth.png` beside `a.jpg` is another kind of
    it, and is not read. Raises UserError for a reference or a mask without a picture, too.
    """
    without = {key: sample for key, sample in samples.items() if PICTURE not in sample}
    for key, sample in without.items():
        for kind in KINDS:
            if kind in sample:
                raise UserError(
                    f"{where}: {sample[kind].name} is the {kind} of no picture: there is no "
                    f"{key}.jpg. Add the picture, or remove the member."
                )
    alone = [sample[OTHER] for sample in without.values() if OTHER in sample]
    if alone:
        raise UserError(
            f"{where}: {few(alone)} would not be read: in tar files a sample's name ends at the "
            "first dot. Rename such pictures, or unpack the files into a folder for each class."
        )


def described(suffix: str, content: str, at: str) -> dict[str, Any]:
    """The label and the caption in the text beside a picture, if any. Raises UserError."""
    label: Label = None
    text: Caption = ""
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
        text = first_caption([values.get(key) for key in METADATA_TEXTS], at)
    return ({} if label is None else {"label": label}) | ({"text": text} if text else {})
