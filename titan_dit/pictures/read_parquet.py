"""Pictures inside parquet files, as Hugging Face's datasets store them.

The column `image` holds the file's bytes, or a struct with `bytes`; `label` a number, whose names
are in the schema's metadata, or a name; `text` or `caption` a caption. Text may be stored as bytes.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from threading import Lock
from typing import Any

from titan_dit.config.section import UserError
from titan_dit.data.class_labels import few
from titan_dit.data.files import BadFileError
from titan_dit.pictures.library import parquet
from titan_dit.pictures.picture_set import (
    Asked,
    PictureSet,
    label_of,
    make_set,
    numbers_if_decimal,
)

IMAGES, LABELS, TEXTS = ("image", "img", "png", "jpg"), ("label", "labels"), ("text", "caption")
KEPT_GROUPS = 3
"""Row groups in memory: threads read ahead into the next one."""


def open_parquet(root: Path, files: Sequence[Path], asked: Asked) -> PictureSet:
    """List the rows of parquet files, one after another. Reads no pictures."""
    library = parquet(f"{asked.where}{root}: parquet")
    names, labels, texts, groups = [], [], [], []
    class_names: Sequence[str] = ()
    for file in files:
        try:
            opened = library.ParquetFile(file)
            columns = opened.schema_arrow.names
            label, text = (
                next((k for k in keys if k in columns), None) for keys in (LABELS, TEXTS)
            )
            wanted = [name for name in (label, text) if name]
            table = opened.read(columns=wanted).to_pydict() if wanted else {}
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise UserError(f"{asked.where}{file} is not readable parquet: {reason}") from None
        image = next((name for name in IMAGES if name in columns), None)
        if image is None:
            raise UserError(
                f"{asked.where}{file} has the columns {', '.join(columns)}, but none of "
                f"{', '.join(IMAGES)} with pictures."
            )
        count = opened.metadata.num_rows
        names += [f"{file.relative_to(root)}:{row}" for row in range(count)]
        labels += [label_of(as_text(value)) for value in table.get(label, [None] * count)]
        texts += [str(as_text(value) or "") for value in table.get(text, [""] * count)]
        groups += [
            (opened, image, number, opened.metadata.row_group(number).num_rows)
            for number in range(opened.num_row_groups)
        ]
        more = names_of(opened.schema_arrow.metadata or {}, label)
        if class_names and more and more != class_names:
            raise UserError(
                f"{asked.where}{file} names the classes {few(more)}, but the files before it "
                f"{few(class_names)}: their numbers differ. Give the files of one of them."
            )
        class_names = class_names or more
    ends = list(accumulate(rows for *_, rows in groups))
    lock = Lock()

    @lru_cache(KEPT_GROUPS)
    def group(number: int) -> Any:
        opened, image, at, _ = groups[number]
        return opened.read_row_group(at, columns=[image]).column(0)

    def read(row: int) -> bytes:
        number = bisect_right(ends, row)
        with lock:  # A file is read by one thread at a time.
            try:
                column = group(number)
            except (OSError, ValueError) as error:
                if isinstance(error, OSError) and error.errno:
                    raise  # Of the disk, not of what the file holds.
                raise BadFileError("in a damaged row group") from None
        value = column[row - (ends[number] - groups[number][3])].as_py()
        data = value.get("bytes") if isinstance(value, Mapping) else value
        if not isinstance(data, bytes) or not data:
            raise BadFileError("holds no bytes of a picture")
        return data

    kind = f"{len(files)} parquet files"
    numbered = numbers_if_decimal(labels)
    return make_set(root, kind, names, numbered, texts, read, asked, class_names)


def as_text(value: object) -> object:
    """Bytes as text: some writers do not mark a column as UTF-8."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def names_of(metadata: Mapping[bytes, bytes], label: str | None) -> Sequence[str]:
    """The classes' names in the metadata of a schema; () if it has none."""
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        return tuple(map(str, features[label]["names"]))
    except (KeyError, TypeError, ValueError):
        return ()
