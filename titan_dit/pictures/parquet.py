"""Pictures, labels and captions in parquet files, which may be damaged or hostile.

The bytes of a picture are read when it is encoded, by row group.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from titan_dit.config import limits
from titan_dit.config.section import UserError, few
from titan_dit.config.user_text import BadTextError, decode, parse_json
from titan_dit.data.files import BadFileError, stamp_of
from titan_dit.pictures.library import parquet
from titan_dit.pictures.picture_set import (
    BYTES_PER_ROW,
    MAX_ROWS,
    Caption,
    Label,
    ListingOptions,
    PictureSet,
    Stamp,
    caption_of,
    label_of,
    make_set,
    numbers_if_decimal,
)

BATCH = 4096
"""Rows of texts and labels per read."""
MAX_GROUP_BYTES = 512 << 20
"""Maximum bytes of an unpacked row group: hubs have up to 500 MB. Reading one takes three times
that."""
SMALL_GROUP, GROUP_RATIO = 64 << 20, 20
"""Maximum bytes of a row group: SMALL_GROUP in any file, or GROUP_RATIO times the file's bytes."""
READING = {"pre_buffer": False, "buffer_size": 1 << 20}
"""Arguments of ParquetFile: by default it holds the packed bytes of everything that it reads."""
MAX_RATIO = 200
"""Maximum ratio of all texts' bytes to the file's."""
IMAGES, PARQUET_LABELS, PARQUET_TEXTS = (
    ("image", "img", "png", "jpg"),
    ("label", "labels"),
    ("text", "caption"),
)
KEPT_GROUPS = 3
"""Row groups in memory: threads read ahead into the next one."""
KEPT_BYTES = MAX_GROUP_BYTES // 2
"""If KEPT_GROUPS groups would exceed these bytes, two are kept: the current and the next one."""


class ParquetTable:
    """A parquet file. Texts and labels are read in batches, pictures by row group."""

    def __init__(self, file: Path, where: str, asked: ListingOptions) -> None:
        """Open the file. Raises UserError, which begins with `where`, if it is not readable."""
        self.file, self.where, self.asked = file, where, asked
        self.library = parquet(where)
        try:
            self.opened: Any = self.library.ParquetFile(file, **READING)
            self.schema: Any = self.opened.schema_arrow
        except Exception as error:  # pyarrow raises any exception on a damaged file.
            raise self.unreadable(error) from None
        self.names: list[str] = self.schema.names
        about = self.opened.metadata
        self.count: int = about.num_rows
        """Number of rows; `check_rows` checks it."""
        stored = sum(about.row_group(group).num_rows for group in range(about.num_row_groups))
        if stored != self.count:
            raise self.unreadable(ValueError(f"it names {self.count:,} rows and holds {stored:,}"))

    def unreadable(self, error: Exception) -> UserError:
        """The error for a damaged file."""
        reason = " ".join(str(error).split()).rstrip(".")
        return UserError(f"{self.where} is not readable parquet: {reason}. Restore the file.")

    def check_rows(self, rows: int, size: int) -> None:
        """Raise UserError if files of `size` bytes list too many `rows`."""
        most = self.asked.max_rows or limits.raised(max(MAX_ROWS, size // BYTES_PER_ROW))
        if rows > most:
            raise UserError(
                f"{self.where} lists {rows:,} rows in {size:,} bytes, more than {most:,}. "
                f"{self.asked.fix('--max-rows')}"
            )

    def rows(self, wanted: Sequence[str]) -> Iterator[dict[str, Any]]:
        """The values of some columns, row by row, without missing columns. Raises UserError."""
        columns = [name for name in wanted if name in self.names]
        if not columns:
            yield from ({} for _ in range(self.count))
            return
        self.check_once(columns)
        texts = [name for name in columns if self.is_text(name)]
        read, most = 0, limits.raised(64 * 2**20 + MAX_RATIO * self.file.stat().st_size)
        try:
            # As a dictionary a text that a million rows repeat is there once.
            opened = self.library.ParquetFile(self.file, read_dictionary=texts, **READING)
            for group in range(opened.num_row_groups):
                self.check_group(group)
            for batch in opened.iter_batches(BATCH, columns=columns):
                found = {
                    name: self.values(column, name, texts)
                    for name, column in zip(batch.schema.names, batch.columns, strict=True)
                }
                for row in range(batch.num_rows):
                    values = {name: column[row] for name, column in found.items()}
                    read += sum(len(x) for x in values.values() if isinstance(x, str))
                    if read > most:
                        raise UserError(
                            f"{self.where}: its texts unpack to more than {MAX_RATIO} times its "
                            f"size. Correct it, or {limits.advice()}."
                        )
                    yield values
        except UserError:
            raise
        except Exception as error:  # As above.
            raise self.unreadable(error) from None

    def check_once(self, columns: Sequence[str]) -> None:
        """Raise UserError for a column that occurs twice."""
        if twice := [name for name in columns if self.names.count(name) > 1]:
            raise UserError(f"{self.where} has several columns {twice[0]}. Keep one of them.")

    def leaves(self, column: str) -> list[str]:
        """Paths of a column's stored columns: a struct has one for each field."""
        stored = self.opened.schema
        paths = [stored.column(number).path for number in range(len(stored))]
        return [path for path in paths if path.partition(".")[0] == column]

    def is_text(self, name: str) -> bool:
        """True for text and bytes, False for numbers. Raises UserError for other types."""
        import pyarrow

        kind, of = self.schema.field(name).type, pyarrow.types
        if of.is_dictionary(kind):
            kind = kind.value_type
        if of.is_string(kind) or of.is_large_string(kind):
            return True
        if of.is_binary(kind) or of.is_large_binary(kind):
            return True
        if not (of.is_integer(kind) or of.is_floating(kind) or of.is_null(kind)):
            raise UserError(
                f"{self.where}: column {name} is {kind}, not text or numbers. Cast it to one of "
                "them."
            )
        return False

    def values(self, column: Any, name: str, texts: Sequence[str]) -> list[Any]:
        """The values of a batch's column. Text may be stored as bytes. Raises UserError."""
        if name not in texts:
            found: list[Any] = column.to_pylist()
            return found
        import pyarrow.compute as compute

        longest = compute.max(compute.binary_length(column.dictionary)).as_py() or 0
        if longest > self.asked.max_text_bytes:
            raise UserError(
                f"{self.where}: a {name} has {longest:,} bytes, more than "
                f"{self.asked.max_text_bytes:,}. {self.asked.fix('--max-text-bytes')}"
            )
        try:
            values = [
                decode(x) if isinstance(x, bytes) else x for x in column.dictionary.to_pylist()
            ]
        except BadTextError as error:
            raise UserError(f"{self.where}: a {name} is {error}. Save it as UTF-8.") from None
        return [None if number is None else values[number] for number in column.indices.to_pylist()]

    def check_group(self, group: int) -> int:
        """Unpacked bytes of a row group; UserError if they are too many.

        The bytes of single columns are not read: pyarrow aborts the process if a column's
        statistics in the footer are damaged.
        """
        size: int = self.opened.metadata.row_group(group).total_byte_size
        of_file = max(SMALL_GROUP, GROUP_RATIO * self.file.stat().st_size)
        most = limits.raised(min(MAX_GROUP_BYTES, of_file))
        if not 0 <= size <= most:
            raise UserError(
                f"{self.where}: row group {group} holds {size:,} bytes, more than {most:,}. Write "
                f"it with smaller row groups: row_group_size=1000. {limits.fix(size, most)}"
            )
        return size


class RowGroup(NamedTuple):
    """A row group of a parquet file."""

    table: ParquetTable
    image: str
    number: int
    rows: int
    bytes: int
    """Unpacked bytes of the whole group."""


def open_parquet(root: Path, files: Sequence[Path], asked: ListingOptions) -> PictureSet:
    """List the rows of parquet files, one after another. Reads no pictures. Raises UserError."""
    names: list[str] = []
    labels: list[Label] = []
    texts: list[Caption] = []
    groups: list[RowGroup] = []
    class_names: Sequence[str] = ()
    total = sum(file.stat().st_size for file in files)
    for file in files:
        table = ParquetTable(file, f"{asked.where}{file}", asked)
        table.check_rows(len(names) + table.count, total)
        groups += groups_of(table)
        label, text = (
            next((k for k in keys if k in table.names), "")
            for keys in (PARQUET_LABELS, PARQUET_TEXTS)
        )
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

    return make_set(
        root,
        asked,
        kind=f"{len(files)} parquet files",
        names=names,
        labels=numbers_if_decimal(labels),
        texts=texts,
        read=read,
        stamp=stamp,
        class_names=class_names,
    )


def groups_of(table: ParquetTable) -> list[RowGroup]:
    """The row groups of a file; UserError if it has no pictures, or too large a group."""
    image = next((name for name in IMAGES if name in table.names), None)
    if image is None:
        raise UserError(
            f"{table.where} has the columns {few(table.names)}, but none of {', '.join(IMAGES)} "
            "with pictures. Rename the column of pictures."
        )
    table.check_once([image])
    about = table.opened.metadata
    return [
        RowGroup(
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

    def __init__(self, groups: Sequence[RowGroup]) -> None:
        self.groups = groups
        self.held: OrderedDict[int, Any] = OrderedDict()
        self.lock = Lock()
        """One thread at a time reads a file."""

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

    def read(self, group: RowGroup) -> Any:
        """Read the pictures of a row group. Raises BadFileError if it is damaged."""
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
    """Class names in the schema's metadata; () if there are none."""
    try:
        features = parse_json(metadata[b"huggingface"])["info"]["features"]
        return tuple(map(str, features[label]["names"]))
    except (KeyError, TypeError, ValueError):
        return ()
