"""Files that belong to a picture: NAME.reference.png and NAME.mask.png beside NAME.png.

A reference is what the network is given of the sample, such as the picture before an edit. A mask
weighs the loss: white counts in full, black not at all; pictures without one count in full.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from titan_dit.config.section import UserError, few
from titan_dit.pictures.captioned_folder import files_of, is_video, stem_of
from titan_dit.pictures.picture_set import ListingOptions, PictureSet

KINDS = "reference", "mask"


def kind_of(name: str) -> tuple[str, str] | None:
    """(kind, stem of the picture) of a companion's file; None for another file."""
    stem, _, kind = stem_of(name).rpartition(".")
    kind = kind.lower()  # As suffixes.
    return (kind, stem) if kind in KINDS and stem.rpartition("/")[2] else None


def with_companions(pictures: PictureSet, asked: ListingOptions) -> PictureSet:
    """The set with the companions of its pictures, which are no pictures of their own.

    Raises UserError for a companion without its picture or of a video, for two of one kind, and for
    references of some pictures only.
    """
    if pictures.path is None or asked.gaps:
        return pictures
    files = files_of(pictures.root, asked.clips).pictures
    kinds = {name: kind_of(name) for name in files}
    found = {name: kind for name, kind in kinds.items() if kind}
    if not found:
        return pictures
    kept = [row for row in range(len(pictures)) if pictures.names[row] not in found]
    pictures = pictures.of_rows(kept)
    row_of = {stem_of(name): row for row, name in enumerate(pictures.names)}
    others = {stem_of(name) for name in files}
    companions: dict[str, dict[int, str]] = {kind: {} for kind in KINDS}
    where = f"{asked.where}{pictures.root}"
    for name, (kind, stem) in found.items():
        row = row_of.get(stem)
        if row is None:
            if stem in others:
                continue  # A metadata file does not list the picture.
            raise UserError(
                f"{where}: {name} is the {kind} of no picture: there is no {stem}.*. Add the "
                "picture, or remove the file."
            )
        if is_video(pictures.names[row]) or is_video(name):
            raise UserError(
                f"{where}: {name} and {pictures.names[row]}: videos have no {kind}s. Remove the "
                "file; the first frame of clips is given by --first-frame true."
            )
        if (other := companions[kind].setdefault(row, name)) != name:
            raise UserError(f"{where}: {other} and {name} are the same {kind}. Keep one.")
    check_references(where, pictures, companions["reference"])
    return replace(pictures, companions={kind: rows for kind, rows in companions.items() if rows})


def check_references(where: str, pictures: PictureSet, references: Mapping[int, str]) -> None:
    """Raise UserError if some pictures have a reference and others do not."""
    rows = range(len(pictures))
    if references and (missing := [pictures.names[row] for row in rows if row not in references]):
        raise UserError(
            f"{where}: {len(references):,} of {len(pictures):,} pictures have a reference, but not "
            f"{few(missing)}. Add NAME.reference.png beside each, or encode them apart."
        )
