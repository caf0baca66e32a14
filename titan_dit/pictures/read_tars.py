"""Pictures in tar files, as webdataset stores them.

The files of a sample share their name up to its first dot: `0001.jpg` with `0001.cls` (a number or
a name), `0001.txt` (a caption) or `0001.json` (`label` and `text`, unless these have files).
"""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from titan_dit.config.section import UserError
from titan_dit.data.class_labels import few
from titan_dit.data.files import BadFileError
from titan_dit.data.recognise import IMAGE_SUFFIXES
from titan_dit.pictures.picture_set import (
    Asked,
    Label,
    PictureSet,
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
    samples: dict[str, dict[str, Any]] = {}
    progress = ProgressLine(len(files), "tar files", what="listed")
    where = f"{asked.where}{root}/"
    for number, file in enumerate(files):
        try:
            with tarfile.open(file, "r:") as archive:
                for member in archive:
                    if member.isfile() or member.issym() or member.islnk():
                        add(samples, archive, member, number, file.relative_to(root), where)
        except (OSError, tarfile.TarError, KeyError) as error:  # KeyError: of a link to nothing.
            raise UserError(
                f"{asked.where}{file} is not a readable tar file ({error}). Compressed ones must "
                "be unpacked: gunzip."
            ) from None
        progress.add(1)
    progress.end()
    refuse_other_names(samples, f"{asked.where}{root}")
    found = {key: sample for key, sample in samples.items() if "picture" in sample}
    labels: list[Label] = [label_of(sample.get("label")) for sample in found.values()]
    texts = [str(sample.get("text") or "") for sample in found.values()]
    members = [sample["picture"] for sample in found.values()]
    descriptors = [os.open(file, os.O_RDONLY) for file in files]

    def read(row: int) -> bytes:
        member = members[row]
        data = os.pread(descriptors[member.file], member.size, member.offset)
        if len(data) != member.size:
            raise BadFileError("cut off with its tar file")
        return data

    kind = f"{len(files)} tar files"
    return make_set(root, kind, list(found), numbers_if_decimal(labels), texts, read, asked)


def add(
    samples: dict[str, dict[str, Any]],
    archive: tarfile.TarFile,
    member: tarfile.TarInfo,
    number: int,
    path: Path,
    where: str,
) -> None:
    """Add a member of a tar file to its sample."""
    folder, _, name = member.name.rpartition("/")
    stem, dot, rest = name.partition(".")
    suffix = f"{dot}{rest}".lower()
    key = f"{path}:{folder}/{stem}" if folder else f"{path}:{stem}"
    if suffix in IMAGE_SUFFIXES:
        sample = samples.setdefault(key, {})
        if "picture" in sample:
            raise UserError(f"{where}{path}: {member.name} is the second picture of {stem}.")
        if not member.isfile():
            raise UserError(
                f"{where}{path}: {member.name} is a link. Make the tar file with --dereference "
                "--hard-dereference."
            )
        sample["picture"] = Member(number, member.offset_data, member.size)
    elif suffix in (LABEL, TEXT, BOTH):
        opened = archive.extractfile(member)
        content = opened.read().decode("utf-8", "replace").strip() if opened else ""
        found = described(suffix, content, f"{where}{path}: {member.name}")
        sample = samples.setdefault(key, {})
        # In whatever order they come.
        sample.update({**found, **sample} if suffix == BOTH else found)
    elif suffix.endswith(IMAGE_SUFFIXES) and stem:
        samples.setdefault(key, {})[OTHER] = f"{path}: {member.name}"


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


def described(suffix: str, content: str, where: str) -> dict[str, Any]:
    """What a text beside a picture says of it."""
    if suffix == LABEL:
        return {"label": content}
    if suffix == TEXT:
        return {"text": content}
    try:
        values = json.loads(content)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is no JSON ({error}).") from None
    if not isinstance(values, dict):
        return {}
    found = {
        "label": values.get("label", values.get("class")),
        "text": values.get("text", values.get("caption")),
    }
    return {key: value for key, value in found.items() if value is not None}
