"""Checks JSON files against a schema: manifests of checkpoints and datasets, records of runs.

A digest only tells that a file is as its maker wrote it. A schema is nested dicts of key -> type,
as sections have them (`conform`), or one of the classes below. Other keys are kept, unchecked: a
later version may have written them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from titan_dit.config.section import Bound, UserError, conform_made, show

COUNT = Annotated[int, Bound(least=0, below=2**62)]
LARGEST = 32 << 20
"""Bytes of a manifest: Python takes up to twenty times as many for what JSON says."""
SHOWN = 80
"""Characters of a wrong value that a message shows."""


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
    """A table of any keys; `key` returns what is wrong with one, or None."""

    schema: Any
    key: Callable[[str], str | None] = lambda _: None


@dataclass(frozen=True)
class Rows:
    """A list of rows of exactly these values."""

    row: Sequence[Any]


@dataclass(frozen=True)
class Row:
    """A list of exactly these values."""

    row: Sequence[Any]


@dataclass(frozen=True)
class Ruled:
    """A value of a schema for which `rule` returns what is wrong, or None."""

    schema: Any
    rule: Callable[[Any], str | None]


ANY = object()
"""A value that is not checked."""
PLAIN = object()
"""A value of a config, whose key is not known here: of limited depth, length and size."""
DEEPEST, LONGEST = 8, 4096
"""Of lists and tables in a PLAIN value, and of its texts."""


def wrong_name(name: str) -> str | None:
    """What is wrong with a file's name in a manifest: it must be of a file beside it."""
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
    elif isinstance(schema, Row | Rows):
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
    """`check` for a table."""
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


def check_list(value: Any, schema: Row | Rows, where: str) -> None:
    """`check` for a list."""
    if not isinstance(value, list | tuple):
        raise UserError(f"{where} = {brief(value)} must be a list.")
    if isinstance(schema, Rows):
        for number, row in enumerate(value):
            check(row, Row(schema.row), f"{where}[{number}]")
        return
    if len(value) != len(schema.row):
        raise UserError(f"{where} holds {len(value)} values, not {len(schema.row)}.")
    for number, (item, inner) in enumerate(zip(value, schema.row, strict=True)):
        check(item, inner, f"{where}[{number}]")


def check_value(value: Any, where: str, deepest: int = DEEPEST) -> None:
    """`check` for a PLAIN value."""
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
    """`check` for a type of a section's key, without a value of any length in the message."""
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
    """The beginning of a value, for messages; what a terminal does not print is escaped."""
    if isinstance(value, list | tuple):
        value = value[:SHOWN]
    try:
        text = show(value)
    except (RecursionError, ValueError):
        text = "..."
    text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[: SHOWN + 1])
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
