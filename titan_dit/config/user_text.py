"""Reads text that users or strangers have written: of limited size, UTF-8, with one-line errors.

Python's parsers raise their own error for bad JSON and TOML, ValueError for an integer of over
4,300 digits, RecursionError for depth, and UnicodeDecodeError. Here all become BadTextError.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from titan_dit.config import limits
from titan_dit.config.section import UserError

MAX_BYTES = 64 << 20
"""Maximum bytes of a file that is read whole."""
MAX_DEPTH = 100
"""Maximum nesting depth of a value: code that walks through it, such as messages, may recurse."""
MAX_LINE_BYTES = 16 << 20
"""Maximum bytes of a line of a run's logs."""
BOM = b"\xef\xbb\xbf"
"""UTF-8 byte order mark, with which some programs begin a file."""


class BadTextError(ValueError):
    """Why a text cannot be read; the caller adds the file and the line."""


def decode(data: bytes | bytearray) -> str:
    """The text of UTF-8 bytes, without a byte order mark. Raises BadTextError."""
    try:
        return data.removeprefix(BOM).decode()
    except UnicodeDecodeError as error:
        raise BadTextError(f"not UTF-8 (byte {error.start + 1})") from None


def read(file: Path, where: str, most: int = MAX_BYTES) -> str:
    """The text of a file, with the line ends as they are; `where` begins an error.

    Raises UserError if it is unreadable or not UTF-8.
    """
    most = limits.raised(most)
    try:
        with file.open("rb") as opened:
            data = opened.read(most + 1)
    except OSError as error:
        raise UserError(f"{where} cannot be read: {error.strerror}.") from None
    refuse_large(len(data), where, most)
    try:
        return decode(data)
    except BadTextError as error:
        raise UserError(f"{where} is {error}. Save it as UTF-8.") from None


def check_size(file: Path, where: str) -> None:
    """Raise UserError for a file above MAX_BYTES, before a library reads it whole."""
    refuse_large(file.stat().st_size, where, limits.raised(MAX_BYTES))


def refuse_large(size: int, where: str, most: int) -> None:
    """Raise UserError for more than `most` bytes; `most` is `raised`."""
    if size > most:
        raise UserError(
            f"{where} is larger than {most:,} bytes, the most that is read of it. If that is no "
            f"mistake, {limits.advice()}."
        )


def lines(file: Path, where: str, most: int, fix: str) -> Iterator[tuple[int, str]]:
    """Number and text of each line that is not blank. `most`: bytes of a line; `fix` ends an error.

    Only a line feed ends a line: a caption may hold other separators, such as U+2028. Raises
    UserError for a file that is unreadable or not UTF-8.
    """
    number = 0
    try:
        with file.open("rb") as opened:
            while data := opened.readline(most + 1):
                number += 1
                if len(data) > most:
                    raise UserError(f"{where}, line {number}: longer than {most:,} bytes. {fix}")
                text = decode(data) if number == 1 else data.decode()
                if text.strip():
                    yield number, text
    except OSError as error:
        raise UserError(f"{where} cannot be read: {error.strerror}.") from None
    except (BadTextError, UnicodeDecodeError):
        raise UserError(f"{where}, line {number}: not UTF-8. Save it as UTF-8.") from None


def parse_json(text: str | bytes, *, unique: bool = False) -> Any:
    """The value of a JSON text; `unique` refuses a key that an object has twice.

    Raises BadTextError.
    """
    if isinstance(text, bytes):
        text = decode(text)
    try:
        return shallow(json.loads(text, object_pairs_hook=once if unique else None))
    except json.JSONDecodeError as error:
        raise BadTextError(f"not JSON ({error})") from None
    except BadTextError:
        raise
    except (ValueError, RecursionError) as error:
        raise BadTextError(f"not JSON ({reason_of(error)})") from None


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of a TOML text. Raises BadTextError, of which a TOMLDecodeError is the cause."""
    import tomli  # Late: benchmarks run where torch alone is installed, and read JSON.

    try:
        tables: dict[str, Any] = shallow(tomli.loads(text))
        return tables
    except tomli.TOMLDecodeError as error:
        raise BadTextError(str(error)) from error
    except (ValueError, RecursionError) as error:
        raise BadTextError(reason_of(error)) from None


def shallow(value: Any) -> Any:
    """A parsed value. Raises RecursionError if it is nested more than MAX_DEPTH deep."""
    level = [value]
    for _ in range(MAX_DEPTH):
        if not (level := [inner for outer in level for inner in within(outer)]):
            return value
    raise RecursionError


def within(outer: Any) -> Sequence[Any]:
    """The tables and lists in a table or list."""
    values = outer.values() if type(outer) is dict else outer if type(outer) is list else ()
    return [value for value in values if type(value) in (dict, list)]


def reason_of(error: Exception) -> str:
    """Text for a parser's error that is not a syntax error: depth, or too many digits."""
    is_deep = isinstance(error, RecursionError)
    return "nested too deeply" if is_deep else "a number of too many digits"


def once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object from its pairs. Raises BadTextError if a key occurs twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        name = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise BadTextError(f"the key {name!a} stands twice. Keep one")
    return found


def read_json(file: Path, where: str, most: int = MAX_BYTES) -> Any:
    """The value of a JSON file; `where` begins an error. Raises UserError if it is invalid."""
    text = read(file, where, most)
    try:
        return parse_json(text)
    except BadTextError as error:
        raise UserError(f"{where} is {error}. Correct or restore the file.") from None


def whole_lines(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number and object of each line of a file that a run appends to; none if it is missing.

    A line that a kill cut, or a failing disk spoiled, is skipped, as is one above MAX_LINE_BYTES.
    """
    if not file.is_file():
        return
    with file.open("rb") as opened:
        number = 0
        while line := opened.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                while line and not line.endswith(b"\n"):
                    line = opened.readline(MAX_LINE_BYTES)
                continue
            with suppress(BadTextError):
                found = parse_json(line)
                if isinstance(found, dict):
                    yield number, found


def read_csv(
    file: Path, where: str, most: int, fix: str, needed: Sequence[str]
) -> Iterator[tuple[int, dict[str, str]]]:
    """Number and fields of each row of a CSV file, whose first line names the columns.

    Raises UserError for a row with another number of fields, as an unquoted comma would shift its
    values, and for a `needed` column that occurs twice.
    """
    # Python's own limit of a field is 131,072 characters, of all readers in the process.
    csv.field_size_limit(min(most, sys.maxsize))
    # Not lines(): a quoted field may hold line ends.
    reader = csv.reader(csv_lines(file, where, most, fix), skipinitialspace=True, strict=True)
    try:
        columns = [name.strip() for name in next(reader, [])]
        if twice := [name for name in needed if columns.count(name) > 1]:
            raise UserError(f"{where} has several columns {twice[0]}. Keep one of them.")
        number = 0
        for fields in reader:
            if not fields:
                continue
            number += 1
            if len(fields) != len(columns):
                raise UserError(
                    f"{where}, row {number} (line {reader.line_num}): {len(fields)} fields for "
                    f"{len(columns)} columns. Put a text with a comma or a quote in quotes: "
                    '"a cat, on a ""mat""".'
                )
            yield number, dict(zip(columns, fields, strict=True))
    except csv.Error as error:
        raise UserError(
            f"{where}, line {reader.line_num}: not CSV ({error}). Correct it."
        ) from None


def csv_lines(file: Path, where: str, most: int, fix: str) -> Iterator[str]:
    """The lines of a CSV file, with their ends. Raises UserError for one too long, or not UTF-8."""
    with io.TextIOWrapper(file.open("rb"), "utf-8-sig", newline="") as opened:
        number = 0
        try:
            while text := opened.readline(most + 1):
                number += 1
                if len(text) > most:
                    raise UserError(f"{where}, line {number}: longer than {most:,} bytes. {fix}")
                yield text
        except UnicodeDecodeError:
            raise UserError(f"{where} is not UTF-8. Save it as UTF-8.") from None


def is_utf8(text: str) -> bool:
    """False for half a surrogate pair, which JSON can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
