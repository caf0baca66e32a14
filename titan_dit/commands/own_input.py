"""No command writes onto what it reads: by name, by a link, by a hard link, or in a folder.

The options declare what is what: `FilePath` and `RunPath` are read, `OutputPath` is written. Files
whose names a command makes itself are in `DerivesFiles.derived`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from titan_dit.commands.flag_advice import flag_of
from titan_dit.config.section import (
    FromHome,
    OfRun,
    Section,
    UserError,
    Written,
    hints_of,
    paths_of,
)
from titan_dit.system import run_files
from titan_dit.system.files import PARTIAL

ASIDE = (PARTIAL, ".parts")
"""Endings of the temporary files and folders of an output; they begin with its name."""


@runtime_checkable
class DerivesFiles(Protocol):
    """Options that read or write more files than their flags name."""

    def derived(self) -> Iterator[tuple[str, str, FromHome]]:
        """Yield (field, path, rule of the path), as `section.paths_of`."""


@dataclass(frozen=True)
class Named:
    """A path of a command line."""

    flag: str
    path: Path
    rule: FromHome

    def __str__(self) -> str:
        return f"{self.flag} {self.path}".strip()


def paths(options: Section, keys: Sequence[str] = ()) -> Iterator[Named]:
    """The paths on a disk that a command names; `keys`: words of keys of the config."""
    hints = hints_of(type(options))
    derived = options.derived() if isinstance(options, DerivesFiles) else ()
    for field, path, rule in (*paths_of(options), *derived):
        if "://" not in path:
            yield Named(flag_of(field, hints[field]), Path(path), rule)
    flag = ""
    for word in keys:
        flag, _, value = word.partition("=") if word.startswith("--") else (flag, "", word)
        if value and "://" not in value:
            yield Named(flag, Path(value).expanduser(), FromHome())


def named(options: Section, keys: Sequence[str] = ()) -> list[tuple[str, str]]:
    """(flag, path) of each path, for the lines of errors."""
    return [(each.flag, str(each.path)) for each in paths(options, keys)]


def check(options: Section, keys: Sequence[str] = ()) -> None:
    """Raise UserError for an output that is an input of the same command, or another output."""
    every = list(paths(options, keys))
    written = [each for each in every if isinstance(each.rule, Written)]
    for at, output in enumerate(written):
        for other in written[:at]:
            if output.flag != other.flag and is_same(output.path, other.path):
                raise UserError(f"{output} is {other}, too. Name another file.")
        for source in every:
            if not isinstance(source.rule, Written) and (what := conflict(output, source)):
                raise UserError(f"{output} {what} {source}, which is read. Name another path.")


def conflict(output: Named, source: Named) -> str:
    """Message about an output that would change an input; "" if none would."""
    if is_same(output.path, source.path):
        return "is"
    if is_aside(source.path, output.path):
        return "takes the temporary files of its name, as"
    if output.path.is_file() and source.path.is_dir() and holds(source, output.path):
        return "is a file of"
    return ""


def is_same(one: Path, other: Path) -> bool:
    """True if two paths are one file or folder, whether it is there yet or not."""
    try:
        return one.samefile(other)
    except OSError:
        return os.path.realpath(one) == os.path.realpath(other)


def is_aside(source: Path, output: Path) -> bool:
    """True if the input is, or is in, the leftovers of a killed command for the output."""
    final, where = Path(os.path.realpath(output)), Path(os.path.realpath(source))
    return any(
        folder.parent == final.parent
        and folder.name.startswith(f"{final.name}.")
        and folder.name.endswith(ASIDE)
        for folder in (where, *where.parents)
    )


def holds(source: Named, file: Path) -> bool:
    """True if a folder that is read has this file; of a run only if it is one of the run's own."""
    root, where = Path(os.path.realpath(source.path)), Path(os.path.realpath(file))
    if root in where.parents:
        return is_read(source, where.relative_to(root))
    # A hard link of a file in the folder: found by its number, if the file has several names.
    found = file.stat()
    return found.st_nlink > 1 and any(
        (entry.st_dev, entry.st_ino) == (found.st_dev, found.st_ino)
        for name in files_in(root)
        if is_read(source, Path(name).relative_to(root)) and (entry := status(name))
    )


def is_read(source: Named, name: Path) -> bool:
    """True if a file of a folder is part of the input."""
    if not isinstance(source.rule, OfRun):
        return True
    inside = source.path.name in run_files.OWN or (source.path / "manifest.json").exists()
    return inside or any(part in run_files.OWN for part in name.parts)


def files_in(folder: Path) -> Iterator[str]:
    """Yield the paths of all files below a folder."""
    for at, _, names in os.walk(folder):
        yield from (f"{at}/{name}" for name in names)


def status(name: str) -> Any:
    """The status of a file; None if it is gone."""
    try:
        return os.lstat(name)
    except OSError:
        return None
