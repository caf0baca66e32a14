"""Rows of tests/plants.toml: the location of each bug and the tests that should catch it."""

from __future__ import annotations

import ast
import textwrap
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGE = "titan_dit"
OUTSIDE = ("benchmarks", "scripts", "tests")
"""Other folders whose symbols can be named, folder first: benchmarks.gpu_plan.cells_for."""
SLOW = ("tests/distributed/", "tests/launcher/", "tests/recovery/", "tests/test_cli_")
"""Tests that start processes; they run last."""


class PlantError(Exception):
    """A row of tests/plants.toml that does not match the code."""


@dataclass(frozen=True)
class Plant:
    """A bug: text inside a symbol's source, and what replaces it."""

    name: str
    symbol: str
    """Dotted name of a class, function or variable, with enough of its module to be unique; or
    the path of a file that is not Python, launch/slurm.sbatch."""
    old: str
    new: str
    why: str
    """The consequence for a user."""
    origin: str
    """Source of the bug: a test, a commit, a note, a random mutant."""
    tests: tuple[str, ...] = ()
    """Files, folders or test ids that may catch it; default: the tests of the symbol's file."""
    survives: str = ""
    """Why a surviving plant is no bug; if empty, survival is a gap in the tests."""


@dataclass(frozen=True)
class Place:
    """Location of a symbol: lines `first` to `last`, counted from 1."""

    file: Path
    first: int
    last: int


def read_plants(file: Path) -> list[Plant]:
    """Rows of a TOML file of plants. Raises PlantError."""
    plants = []
    for row in tomllib.loads(file.read_text())["plant"]:
        try:
            plants.append(Plant(**{**row, "tests": tuple(row.get("tests", ()))}))
        except TypeError as error:
            raise PlantError(
                f"{file.name}, {row.get('name', 'a row without a name')}: {error}"
            ) from None
    names = [plant.name for plant in plants]
    if twice := {name for name in names if names.count(name) > 1}:
        raise PlantError(f"{file.name} has {', '.join(sorted(twice))} twice.")
    return plants


@cache
def symbols(source: str) -> list[tuple[str, int, int]]:
    """(dotted name, first line, last line) of every class, function and variable of a module."""
    return list(named_in(ast.parse(source).body, ""))


def named_in(body: Sequence[ast.AST], prefix: str) -> Iterator[tuple[str, int, int]]:
    """Names defined in a body, and in nested classes and functions."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            yield f"{prefix}{node.name}", first, node.end_lineno or first
            yield from named_in(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    yield f"{prefix}{target.id}", node.lineno, node.end_lineno or node.lineno


@cache
def sources(folder: Path) -> list[tuple[Path, str]]:
    """The Python files of a folder, with their text as it is at the first call."""
    return [(file, file.read_text()) for file in sorted(folder.rglob("*.py"))]


def find(root: Path, symbol: str) -> Place:
    """The unique place in the package whose dotted name ends in `symbol`. Raises PlantError."""
    if "/" in symbol:
        if not (root / symbol).is_file():
            raise PlantError(f"{symbol} does not exist. Fix the symbol of the row.")
        return Place(root / symbol, 1, len((root / symbol).read_text().splitlines()))
    found: dict[str, list[Place]] = {}
    folder = first if (first := symbol.partition(".")[0]) in OUTSIDE else PACKAGE
    last_name = symbol.rpartition(".")[2]
    for file, source in sources(root / folder):
        if last_name not in source:
            continue
        module = ".".join(file.relative_to(root).with_suffix("").parts)
        for name, start, end in symbols(source):
            if f".{module}.{name}".endswith(f".{symbol}"):
                found.setdefault(f"{module}.{name}", []).append(Place(file, start, end))
    places = [place for of_one_name in found.values() for place in of_one_name]
    if not places:
        raise PlantError(f"{symbol} is not in {folder}. Fix the symbol of the row.")
    if len(places) > 1:
        where = ", ".join(f"{name} (line {p.first})" for name, ps in found.items() for p in ps)
        raise PlantError(f"{symbol} is in {len(places)} places: {where}. Give more of its name.")
    return places[0]


def planted(plant: Plant, place: Place) -> str:
    """Source of the symbol's file with the bug. Raises PlantError."""
    lines = place.file.read_text().splitlines(keepends=True)
    source = "".join(lines[place.first - 1 : place.last])
    if (count := source.count(plant.old)) != 1:
        raise PlantError(f"{plant.symbol} has the text {plant.old!r} {count} times, not once.")
    with_bug = source.replace(plant.old, plant.new)
    lines[place.first - 1 : place.last] = with_bug
    changed = "".join(lines)
    if place.file.suffix == ".py" and not parses(with_bug):
        try:
            ast.parse(changed)
        except SyntaxError as error:
            raise PlantError(f"{plant.symbol} with the bug does not parse: {error}.") from None
    return changed


def parses(part: str) -> bool:
    """True if a symbol's source parses by itself, which takes less time than its file."""
    try:
        ast.parse(textwrap.dedent(part))
    except SyntaxError:
        return False
    return True


def mirror(root: Path, file: Path) -> str:
    """Tests of a source file: its test file, or else the test folder of its package.

    A room within a room may have its tests in the outer one's folder: tests/pipeline/ is flat.
    """
    inner = file.relative_to(root / PACKAGE)
    name = f"test_{inner.stem.strip('_')}.py"
    folders = [Path("tests") / parent for parent in inner.parents]
    for folder in folders[:-1] or folders:
        if (root / folder / name).exists():
            return (folder / name).as_posix()
    for folder in folders[:-1]:
        if (root / folder).is_dir():
            return folder.as_posix()
    raise PlantError(f"{folders[0] / name} does not exist. Give the row tests.")


def pick_tests(
    root: Path, plant: Plant, place: Place, override: Sequence[str] = ()
) -> tuple[str, ...]:
    """Tests to run for a plant, fast ones first. Raises PlantError."""
    tests = tuple(override) or plant.tests or (mirror(root, place.file),)
    for test in tests:
        if not (root / test.partition("::")[0]).exists():
            raise PlantError(f"test {test} does not exist. Fix the tests of the row.")
    return fast_first(tests)


def fast_first(tests: Iterable[str]) -> tuple[str, ...]:
    """Tests that start processes last, otherwise in the given order."""
    ordered = sorted(tests) if isinstance(tests, set) else tests
    return tuple(sorted(ordered, key=lambda test: test.startswith(SLOW)))


def prepare(
    root: Path, plants: Sequence[Plant], override: Sequence[str] = ()
) -> dict[str, tuple[Path, str, tuple[str, ...]]]:
    """(file, source with the bug, tests) by plant. Raises one PlantError with all errors."""
    ready, wrong = {}, []
    for plant in plants:
        try:
            place = find(root, plant.symbol)
            source = planted(plant, place)
            tests = pick_tests(root, plant, place, override)
            ready[plant.name] = place.file.relative_to(root), source, tests
        except PlantError as error:
            wrong.append(f"{plant.name}: {error}")
    if wrong:
        raise PlantError("\n".join(wrong))
    return ready
