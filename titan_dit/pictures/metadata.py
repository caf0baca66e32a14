"""Pictures that are listed by metadata.jsonl, .csv or .parquet beside them."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from titan_dit.config import user_text
from titan_dit.config.section import UserError
from titan_dit.data.files import NO_FILE, BadFileError, read_whole, stamp_of
from titan_dit.pictures.parquet import ParquetTable
from titan_dit.pictures.picture_set import (
    Caption,
    Label,
    ListingOptions,
    PictureSet,
    Stamp,
    first_caption,
    is_number,
    label_of,
    make_set,
    numbers_if_decimal,
)

FILES = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
NAME, METADATA_LABELS, METADATA_TEXTS = "file_name", ("label", "class"), ("text", "caption")
COLUMNS = (NAME, *METADATA_LABELS, *METADATA_TEXTS)


def open_metadata(root: Path, file: Path, asked: ListingOptions) -> PictureSet:
    """List the rows of a metadata file. Raises UserError."""
    where = f"{asked.where}{file}"
    names: list[str] = []
    labels: list[tuple[Label, ...]] = []
    texts: list[Caption] = []
    for number, row in enumerate(rows_of(file, where, asked), 1):
        at = f"{where}, row {number}"
        names.append(name_of(row, at, root))
        labels.append(tuple(label_of(row.get(key), at) for key in METADATA_LABELS))
        texts.append(first_caption([row.get(key) for key in METADATA_TEXTS], at))

    def read(row: int) -> bytes:
        path = found_file(root, names[row])
        if path is None:
            backslash = ": write / between folders" if "\\" in names[row] else ""
            raise BadFileError(f"no such file{backslash}")
        return bytes(read_whole(path, asked.check_size))

    def stamp(row: int) -> Stamp:
        found = stamp_of(root / names[row])
        if found != NO_FILE or names[row].isascii():
            return found
        return stamp_of(found_file(root, names[row]) or root / names[row])

    def path(row: int) -> Path:
        return found_file(root, names[row]) or root / names[row]

    numbers = numbers_if_decimal(chosen(labels, where))
    return make_set(
        root,
        asked,
        kind=file.name,
        names=names,
        labels=numbers,
        texts=texts,
        read=read,
        stamp=stamp,
        path=path,
    )


def rows_of(file: Path, where: str, asked: ListingOptions) -> Iterator[Mapping[str, Any]]:
    """The rows of a metadata file. Raises UserError for a damaged one."""
    most, fix = asked.max_text_bytes, asked.fix("--max-text-bytes")
    if file.suffix == ".parquet":
        table = ParquetTable(file, where, asked)
        table.check_rows(table.count, file.stat().st_size)
        yield from table.rows(COLUMNS)
    elif file.suffix == ".csv":
        for _, fields in user_text.read_csv(file, where, most, fix, COLUMNS):
            yield fields
    else:
        for number, line in user_text.lines(file, where, most, fix):
            try:
                row = user_text.parse_json(line, unique=True)
            except user_text.BadTextError as error:
                raise UserError(f"{where}, line {number}: {error}.") from None
            if not isinstance(row, dict):
                raise UserError(
                    f'{where}, line {number}: no JSON object. Write {{"{NAME}": "a.png", ...}}.'
                )
            # Only these: other columns, such as embeddings, may be large.
            yield {key: row[key] for key in COLUMNS if key in row}


def name_of(row: Mapping[str, Any], at: str, root: Path) -> str:
    """The file name in a metadata row, relative to `root`. Raises UserError."""
    name = row.get(NAME)
    if not isinstance(name, str) or not name:
        raise UserError(f"{at}: {NAME} is missing. Name the picture of every row.")
    if "\0" in name or not user_text.is_utf8(name):
        raise UserError(f"{at}: {NAME} {name!a} is no name of a file. Correct it.")
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise UserError(f"{at}: {NAME} {name} is outside {root}. Name files relative to it.")
    return name


def found_file(root: Path, name: str) -> Path | None:
    """The file of that name, in either normalization of Unicode; None if there is none.

    macOS packs names in another normalization than most metadata has.
    """
    forms = [name]
    if not name.isascii():
        forms += [unicodedata.normalize(form, name) for form in ("NFC", "NFD")]
    return next((root / form for form in forms if (root / form).is_file()), None)


def chosen(labels: Sequence[tuple[Label, ...]], where: str) -> list[Label]:
    """The `label` of each row; where it is missing, the `class`.

    Raises UserError if some rows have a number as label and others a name as class.
    """
    found = [a if a is not None else b for a, b in labels]
    filled = [a is not None for a, _ in labels]
    kinds = {
        (is_first, is_number(label))
        for is_first, label in zip(filled, found, strict=True)
        if label is not None
    }
    if {(True, True), (False, False)} <= kinds:
        row = next(i for i, x in enumerate(found) if not filled[i] and x is not None)
        raise UserError(
            f"{where}, row {row + 1}: {METADATA_LABELS[1]} {found[row]} without a "
            f"{METADATA_LABELS[0]}, which is a number"
            f" in other rows. Give it one, or leave its {METADATA_LABELS[1]} out."
        )
    return found
