"""Reads a TOML file that a person has written; errors show the line and how to write it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from titan_dit.config import user_text
from titan_dit.config.section import UserError

MAX_BYTES = 16 << 20
HEADING = re.compile(r"\s*\[([^\[\]]+)\]")
ENTRY = re.compile(r"\s*([\w.-]+)\s*=\s*(.*?)\s*(?:#.*)?$")
ADVICE = (
    (r"(True|False)", "TOML writes true and false"),
    (r"(None|null|nil)", "TOML has no such value: leave the key out"),
    (r'".*\\.*"', "write text with a backslash in single quotes"),
    (r"[-+]?(\.\d+|\d+\.)(e.*)?", "write a digit on both sides of the point"),
    (r"[A-Za-z/~.][^\"']*", "text stands in quotes"),
    (r"[-+]?[\d_.,]*\d[ ,kKmM]+\d*[kKmM]?", "write a number with digits, 10_000, and a point"),
    (r"0\d+", "write a number without leading zeros"),
    (r"[\u2018-\u201f].*", 'write plain quotes, "'),
    (r"", "the key has no value"),
)
"""(pattern of a wrongly written value, advice)."""


def parse(path: Path) -> dict[str, Any]:
    """The tables of a file; UserError with file and line on a syntax error."""
    text = user_text.read(path, str(path), MAX_BYTES).replace("\r\n", "\n").replace("\r", "\n")
    try:
        return user_text.parse_toml(text)
    except user_text.BadTextError as error:
        hint = advice(text, str(error)) if error.__cause__ else ""
        if path.suffix != ".toml":
            hint += " A config is a TOML file, such as train_configs/digits.toml."
        raise UserError(f"{path} is not valid TOML: {error}.{hint}") from None


def advice(text: str, message: str) -> str:
    """The line of a syntax error, and how to write it."""
    if "overwrite" in message and (twice := repeated(text)):
        return f" {twice} stands twice: keep one."
    found, lines = re.search(r"at line (\d+)", message), text.splitlines()
    line = lines[int(found[1]) - 1] if found else next((line for line in lines[::-1] if line), "")
    if "twice" in message:
        return f" Put all keys of {line.strip()} under one heading."
    said = f" The line is: {line.strip()}"
    if entry := ENTRY.match(line):
        said += next((f" ({way})" for form, way in ADVICE if re.fullmatch(form, entry[2])), "")
    elif re.match(r"\s*-?\s*\w+\s*:", line):
        said += " (TOML writes key = value, below a [section])"
    return said


def repeated(text: str) -> str | None:
    """The first key that occurs twice in a section, as "[section] key"; None without one."""
    section, seen = "", set[str]()
    for line in text.splitlines():
        if heading := HEADING.match(line):
            section = heading[1].strip()
        elif entry := ENTRY.match(line):
            name = f"[{section}] {entry[1]}"
            if name in seen:
                return name
            seen.add(name)
    return None
