"""A parquet file within bounds: a few kilobytes of it may stand for gigabytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from titan_dit.config import limits
from titan_dit.config.section import UserError
from titan_dit.config.user_text import BadTextError, decode
from titan_dit.pictures.library import parquet
from titan_dit.pictures.picture_set import BYTES_PER_ROW, MAX_ROWS, Asked

BATCH = 4096
"""Rows of texts and labels that are read at once."""
MAX_GROUP_BYTES = 512 << 20
"""Bytes of a row group in memory: on hubs up to 500 MB. Reading takes three times that."""
SMALL_GROUP, GROUP_RATIO = 64 << 20, 20
"""Bytes of a row group that any file may hold, and for each byte of a file."""
READING = {"pre_buffer": False, "buffer_size": 1 << 20}
"""Of ParquetFile: otherwise it also holds the packed bytes of all that it reads."""
MAX_RATIO = 200
"""Bytes of all texts for a byte of the file."""


class ParquetTable:
    """A file; texts and labels are read in batches, pictures by row group."""

    def __init__(self, file: Path, where: str, asked: Asked) -> None:
        """Open it. Raises UserError, which `where` begins, if it is not readable."""
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
        """Rows, as check_rows has seen them."""
        stored = sum(about.row_group(group).num_rows for group in range(about.num_row_groups))
        if stored != self.count:
            raise self.unreadable(ValueError(f"it names {self.count:,} rows and holds {stored:,}"))

    def unreadable(self, error: Exception) -> UserError:
        """The error for a damaged file."""
        return UserError(f"{self.where} is not readable parquet: {' '.join(str(error).split())}")

    def check_rows(self, rows: int, size: int) -> None:
        """Raise UserError for more `rows` than files of `size` bytes may list."""
        most = self.asked.max_rows or limits.raised(max(MAX_ROWS, size // BYTES_PER_ROW))
        if rows > most:
            raise UserError(
                f"{self.where} lists {rows:,} rows in {size:,} bytes, more than {most:,}. "
                f"{self.asked.fix('--max-rows')}"
            )

    def rows(self, wanted: Sequence[str]) -> Iterator[dict[str, Any]]:
        """The values of some columns, row by row; those that the file lacks are left out."""
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
        """Raise UserError for a column that the file has twice."""
        if twice := [name for name in columns if self.names.count(name) > 1]:
            raise UserError(f"{self.where} has several columns {twice[0]}. Keep one of them.")

    def leaves(self, column: str) -> list[str]:
        """Columns as parquet stores them: a struct is one for each of its fields."""
        stored = self.opened.schema
        paths = [stored.column(number).path for number in range(len(stored))]
        return [path for path in paths if path.partition(".")[0] == column]

    def is_text(self, name: str) -> bool:
        """True for text and bytes; UserError for what is neither text nor a number."""
        import pyarrow

        kind, of = self.schema.field(name).type, pyarrow.types
        if of.is_dictionary(kind):
            kind = kind.value_type
        if of.is_string(kind) or of.is_large_string(kind):
            return True
        if of.is_binary(kind) or of.is_large_binary(kind):
            return True
        if not (of.is_integer(kind) or of.is_floating(kind) or of.is_null(kind)):
            raise UserError(f"{self.where}: column {name} is {kind}, not text or numbers.")
        return False

    def values(self, column: Any, name: str, texts: Sequence[str]) -> list[Any]:
        """The values of a batch; bytes, with which some writers mark text, as text."""
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
        """Bytes of a row group, unpacked; UserError if they are too many.

        Those of its columns are not asked for: pyarrow aborts the process if the footer's
        statistics of a column are damaged.
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
