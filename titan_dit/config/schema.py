"""Checks JSON files against a schema: manifests of checkpoints and datasets, records of runs.

A digest only shows that a file is unchanged since it was written. A schema is a nested dict of
key -> type as in config sections (`conform`), or an instance of a class below. Other keys are kept,
unchecked: a later version may have written them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from titan_dit.config.section import Bound, UserError, conform_made, show

COUNT = Annotated[int, Bound(least=0, below=2**62)]
LARGEST = 32 << 20
"""Maximum bytes of a manifest: parsed JSON takes up to 20 times its bytes in memory."""
SHOWN = 80
"""Maximum characters of a wrong value in a message."""


@dataclass(frozen=True)
class Maybe:
    """A key that may be missing."""

    schema: Any


@dataclass(frozen=True)
class OrNone:
    """A value, or null."""

    schema: Any


@dataclass(frozen=True)
class Either:
    """A plain value, or a list."""

    plain: Any
    several: Any


@dataclass(frozen=True)
class Each:
    """A table with arbitrary keys and values of one schema.

    `key` returns what is wrong with a key, or None.
    """

    schema: Any
    key: Callable[[str], str | None] = lambda _: None


@dataclass(frozen=True)
class Rows:
    """A list of lists, each a `Row` of these schemas."""

    row: Sequence[Any]


@dataclass(frozen=True)
class Many:
    """A list of values of one schema."""

    schema: Any


@dataclass(frozen=True)
class Row:
    """A list of fixed length, with a schema for each value."""

    row: Sequence[Any]


@dataclass(frozen=True)
class Ruled:
    """A value of a schema with a further check: `rule` returns what is wrong, or None."""

    schema: Any
    rule: Callable[[Any], str | None]


ANY = object()
"""A value that is not checked."""
PLAIN = object()
"""A config value whose type is not known here; only depth, text length and integers are limited."""
DEEPEST, LONGEST = 8, 4096
"""Limits of a PLAIN value: nesting depth of lists and tables, and characters of a text."""


def wrong_name(name: str) -> str | None:
    """Message about a file name that is none or leaves the folder; None if it is right."""
    if name in ("", ".", "..") or not name.isprintable() or {*name} & {*"/\\"}:
        return "is not the name of a file in the folder of the manifest"
    return None


def check(value: Any, schema: Any, where: str) -> None:
    """Raise UserError, one line that begins with `where`, unless a value fits a schema."""
    if schema is ANY:
        return
    if schema is PLAIN:
        check_value(value, where)
    elif isinstance(schema, Maybe | OrNone):
        if value is not None or isinstance(schema, Maybe):
            check(value, schema.schema, where)
    elif isinstance(schema, Mapping | Each):
        check_table(value, schema, where)
    elif isinstance(schema, Row | Rows | Many):
        check_list(value, schema, where)
    elif isinstance(schema, Either):
        check(value, schema.several if isinstance(value, list | tuple) else schema.plain, where)
    elif isinstance(schema, Ruled):
        check(value, schema.schema, where)
        if wrong := schema.rule(value):
            raise UserError(f"{where} = {brief(value)} {wrong}.")
    else:
        check_plain(value, schema, where)


def check_table(value: Any, schema: Mapping[str, Any] | Each, where: str) -> None:
    """`check` for a table; raises UserError."""
    if not isinstance(value, dict):
        raise UserError(f"{where} = {brief(value)} must be a table.")
    if isinstance(schema, Each):
        for key, item in value.items():
            if wrong := schema.key(key):
                raise UserError(f"{where}: the name {brief(key)} {wrong}.")
            check(item, schema.schema, f"{where} {brief(key)[1:-1]}")
        return
    for key, inner in schema.items():
        if key in value:
            check(value[key], inner, f"{where} {key}")
        elif not isinstance(inner, Maybe):
            raise UserError(f"{where} {key} is missing.")


def check_list(value: Any, schema: Row | Rows | Many, where: str) -> None:
    """`check` for a list; raises UserError."""
    if not isinstance(value, list | tuple):
        raise UserError(f"{where} = {brief(value)} must be a list.")
    if not isinstance(schema, Row):
        inner = Row(schema.row) if isinstance(schema, Rows) else schema.schema
        for number, row in enumerate(value):
            check(row, inner, f"{where}[{number}]")
        return
    if len(value) != len(schema.row):
        raise UserError(f"{where} holds {len(value)} values, not {len(schema.row)}.")
    for number, (item, inner) in enumerate(zip(value, schema.row, strict=True)):
        check(item, inner, f"{where}[{number}]")


def check_value(value: Any, where: str, deepest: int = DEEPEST) -> None:
    """`check` for a PLAIN value; raises UserError."""
    if isinstance(value, int) and abs(value) >= 2**63:
        raise UserError(f"{where} = {brief(value)} is out of range.")
    if isinstance(value, str) and len(value) > LONGEST:
        raise UserError(f"{where} = {brief(value)} is longer than {LONGEST} characters.")
    if isinstance(value, list | dict):
        if not deepest:
            raise UserError(f"{where} is nested too deep.")
        for item in value.values() if isinstance(value, dict) else value:
            check_value(item, where, deepest - 1)


def check_plain(value: Any, hint: Any, where: str) -> None:
    """`check` for a type of a section's key; raises UserError, short even for a long value."""
    try:
        conform_made(value, hint, where)
    except RecursionError:
        raise UserError(f"{where} is nested too deep.") from None
    except UserError as error:
        text = str(error)
        if len(text) > len(where) + 2 * SHOWN:
            text = f"{where} = {brief(value)} has the wrong type or is out of range."
        raise UserError(text) from None


def brief(value: Any) -> str:
    """The beginning of a value, for messages; unprintable characters are escaped."""
    if isinstance(value, list | tuple):
        value = value[:SHOWN]
    try:
        text = show(value)
    except (RecursionError, ValueError):
        text = "..."
    text = text[: SHOWN + 1]
    if not text.isprintable():
        text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
