"""Pictures inside parquet files, as Hugging Face's datasets store them.

The column `image` holds the file's bytes, or a struct with `bytes`; `label` a number, whose names
are in the schema's metadata, or a name; `text` or `caption` a caption. Text may be stored as bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from titan_dit.config.section import UserError
from titan_dit.config.user_text import parse_json
from titan_dit.data.class_labels import few
from titan_dit.data.files import BadFileError, stamp_of
from titan_dit.pictures.parquet_table import MAX_GROUP_BYTES, READING, ParquetTable
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

IMAGES, LABELS, TEXTS = ("image", "img", "png", "jpg"), ("label", "labels"), ("text", "caption")
KEPT_GROUPS = 3
"""Row groups in memory: threads read ahead into the next one."""
KEPT_BYTES = MAX_GROUP_BYTES // 2
"""Row groups in memory beyond these bytes are two: that of most threads, and the next one."""


class Group(NamedTuple):
    """A row group of a file."""

    table: ParquetTable
    image: str
    number: int
    rows: int
    bytes: int
    """Of its pictures, unpacked."""


def open_parquet(root: Path, files: Sequence[Path], asked: Asked) -> PictureSet:
    """List the rows of parquet files, one after another. Reads no pictures."""
    names: list[str] = []
    labels: list[Label] = []
    texts: list[str] = []
    groups: list[Group] = []
    class_names: Sequence[str] = ()
    total = sum(file.stat().st_size for file in files)
    for file in files:
        table = ParquetTable(file, f"{asked.where}{file}", asked)
        table.check_rows(len(names) + table.count, total)
        groups += groups_of(table)
        label, text = (next((k for k in keys if k in table.names), "") for keys in (LABELS, TEXTS))
        for row, values in enumerate(table.rows([name for name in (label, text) if name])):
            at = f"{table.where}, row {row + 1}"
            names.append(f"{file.relative_to(root)}:{row}")
            labels.append(label_of(values.get(label), at))
            texts.append(caption_of(values.get(text), at))
        more = names_of(table.schema.metadata or {}, label)
        if class_names and more and more != class_names:
            raise UserError(
                f"{asked.where}{file} names the classes {few(more)}, but the files before it "
                f"{few(class_names)}: their numbers differ. Give the files of one of them."
            )
        class_names = class_names or more
    ends = list(accumulate(group.rows for group in groups))
    held = HeldGroups(groups)

    def read(row: int) -> bytes:
        number = bisect_right(ends, row)
        column = held.column(number)
        try:
            value = column[row - (ends[number] - groups[number].rows)].as_py()
        except UnicodeDecodeError:
            raise BadFileError("has a path that is not UTF-8") from None
        data = value.get("bytes") if isinstance(value, Mapping) else value
        if not isinstance(data, bytes) or not data:
            raise BadFileError("holds no bytes of a picture")
        asked.check_size(len(data))
        return data

    stamps = {id(group.table): stamp_of(group.table.file) for group in groups}

    def stamp(row: int) -> Stamp:
        return stamps[id(groups[bisect_right(ends, row)].table)]

    kind = f"{len(files)} parquet files"
    numbered = numbers_if_decimal(labels)
    return make_set(root, kind, names, numbered, texts, read, stamp, asked, class_names)


def groups_of(table: ParquetTable) -> list[Group]:
    """The row groups of a file; UserError if it has no pictures, or too large a group."""
    image = next((name for name in IMAGES if name in table.names), None)
    if image is None:
        raise UserError(
            f"{table.where} has the columns {few(table.names)}, but none of {', '.join(IMAGES)} "
            "with pictures."
        )
    table.check_once([image])
    about = table.opened.metadata
    return [
        Group(
            table,
            image,
            number,
            about.row_group(number).num_rows,
            table.check_group(number),
        )
        for number in range(table.opened.num_row_groups)
    ]


class HeldGroups:
    """The pictures of the row groups that were read last."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = groups
        self.held: OrderedDict[int, Any] = OrderedDict()
        self.lock = Lock()
        """A file is read by one thread at a time."""

    def column(self, number: int) -> Any:
        """The pictures of a row group. Raises BadFileError if it is damaged."""
        with self.lock:
            if number not in self.held:
                large = self.groups[number].bytes > KEPT_BYTES // KEPT_GROUPS
                while len(self.held) >= (2 if large else KEPT_GROUPS):
                    self.held.popitem(last=False)
                self.held[number] = self.read(self.groups[number])
            self.held.move_to_end(number)
            return self.held[number]

    def read(self, group: Group) -> Any:
        """Read the pictures of a row group."""
        opened = group.table.opened
        try:
            if group.rows * group.bytes > MAX_GROUP_BYTES:
                # Rows may repeat a picture, which is there once in a dictionary.
                leaves = group.table.leaves(group.image)
                opened = group.table.library.ParquetFile(
                    group.table.file, read_dictionary=leaves, **READING
                )
            return opened.read_row_group(group.number, columns=[group.image]).column(0)
        except Exception as error:  # pyarrow raises any exception on a damaged file.
            if isinstance(error, OSError) and error.errno:
                raise  # Of the disk, not of what the file holds.
            raise BadFileError("in a damaged row group") from None


def names_of(metadata: Mapping[bytes, bytes], label: str) -> Sequence[str]:
    """The classes' names in the metadata of a schema; () if it has none."""
    try:
        features = parse_json(metadata[b"huggingface"])["info"]["features"]
        return tuple(map(str, features[label]["names"]))
    except (KeyError, TypeError, ValueError):
        return ()
