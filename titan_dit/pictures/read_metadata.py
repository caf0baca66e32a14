"""Pictures that a `metadata.jsonl`, `.csv` or `.parquet` beside them lists.

A row has `file_name`, relative to the folder, and perhaps `label` (or `class`) and `text` (or
`caption`). Pictures that no row names are left out.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from titan_dit.config.section import UserError
from titan_dit.data.files import BadFileError, read_whole
from titan_dit.pictures.library import parquet
from titan_dit.pictures.picture_set import (
    Asked,
    Label,
    PictureSet,
    is_number,
    label_of,
    make_set,
    numbers_if_decimal,
)

FILES = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
NAME, LABELS, TEXTS = "file_name", ("label", "class"), ("text", "caption")


def open_metadata(root: Path, file: Path, asked: Asked) -> PictureSet:
    """List the rows of a metadata file."""
    where = f"{asked.where}{file}"
    rows = {".jsonl": of_jsonl, ".csv": of_csv, ".parquet": of_parquet}[file.suffix](file, where)
    names: list[str] = []
    for number, row in enumerate(rows, 1):
        name = row.get(NAME)
        if not isinstance(name, str) or not name:
            raise UserError(f"{where}, row {number}: {NAME} is missing.")
        if "\0" in name or not is_utf8(name):
            raise UserError(f"{where}, row {number}: {NAME} {name!a} is no name of a file.")
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise UserError(
                f"{where}, row {number}: {NAME} {name} is outside {root}. Name files "
                "relative to it."
            )
        names.append(name)
    labels = labels_of(rows, where)
    texts = [str(row.get(TEXTS[0]) or row.get(TEXTS[1]) or "") for row in rows]

    def read(row: int) -> bytes:
        path = root / names[row]
        if not path.is_file():
            backslash = ": write / between folders" if "\\" in names[row] else ""
            raise BadFileError(f"no such file{backslash}")
        return bytes(read_whole(path))

    return make_set(root, file.name, names, numbers_if_decimal(labels), texts, read, asked)


def labels_of(rows: Sequence[Mapping[str, Any]], where: str) -> list[Label]:
    """The `label` of each row, or its `class` if it has none.

    Raises UserError if some rows have a number as label and others a name as class.
    """
    columns = [[label_of(row.get(key)) for row in rows] for key in LABELS]
    found = [a if a is not None else b for a, b in zip(*columns, strict=True)]
    filled = [a is not None for a in columns[0]]
    kinds = {
        (is_first, is_number(label))
        for is_first, label in zip(filled, found, strict=True)
        if label is not None
    }
    if {(True, True), (False, False)} <= kinds:
        row = next(i for i, x in enumerate(found) if not filled[i] and x is not None)
        raise UserError(
            f"{where}, row {row + 1}: {LABELS[1]} {found[row]} without a {LABELS[0]}, which is a "
            f"number in other rows. Give it one, or leave its {LABELS[1]} out."
        )
    return found


def of_jsonl(file: Path, where: str) -> list[Mapping[str, Any]]:
    """The rows of a file with a JSON object in each line."""
    rows: list[Mapping[str, Any]] = []
    # Not splitlines: a caption may hold other line separators, such as U+2028.
    for number, line in enumerate(text_of(file, where).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{where}, line {number}: no JSON ({error}).") from None
        if not isinstance(row, dict):
            raise UserError(f"{where}, line {number}: no JSON object.")
        rows.append(row)
    return rows


def of_csv(file: Path, where: str) -> list[Mapping[str, Any]]:
    """The rows of a CSV file, whose first line names the columns."""
    text = io.StringIO(text_of(file, where), newline="")
    reader = csv.DictReader(text, skipinitialspace=True)
    try:
        names = [name.strip() for name in reader.fieldnames or ()]
        if twice := [name for name in (NAME, *LABELS, *TEXTS) if names.count(name) > 1]:
            raise UserError(f"{where} has several columns {twice[0]}. Keep one of them.")
        reader.fieldnames = names
        return list(reader)
    except csv.Error as error:
        raise UserError(f"{where}, line {reader.line_num}: no CSV ({error}).") from None


def of_parquet(file: Path, where: str) -> list[Mapping[str, Any]]:
    """The rows of a parquet file, without the columns that are not needed."""
    library = parquet(where)
    try:
        opened = library.ParquetFile(file)
        wanted = [name for name in (NAME, *LABELS, *TEXTS) if name in opened.schema_arrow.names]
        rows: list[Mapping[str, Any]] = opened.read(columns=wanted).to_pylist()
    except (OSError, ValueError) as error:
        raise UserError(f"{where} is not a readable parquet file: {error}") from None
    return rows


def is_utf8(text: str) -> bool:
    """False for half a surrogate pair, which JSON can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def text_of(file: Path, where: str) -> str:
    """The text of a UTF-8 file, with or without a byte order mark."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{where} is not UTF-8 text. Save it as UTF-8.") from None
