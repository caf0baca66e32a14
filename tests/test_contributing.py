"""CONTRIBUTING.md describes the house as it is."""

import re
import tomllib

from commands import ROOT

TEXT = (ROOT / "CONTRIBUTING.md").read_text()
PACKAGE = ROOT / "titan_dit"


def test_the_order_of_rooms_is_that_of_the_contract():
    block = re.search(r"```\n(system < config.*?)```", TEXT, re.DOTALL)[1]
    told = [set(re.split(r"[,\s]+", layer.strip())) for layer in block.split("<")]
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = contracts["contracts"][0]["layers"]
    assert told == [set(layer.split(" | ")) for layer in reversed(layers)]


def test_both_evenings_read_are_as_long_as_they_say():
    part = TEXT[TEXT.index("## An evening's read") : TEXT.index("The other folders can wait")]
    first, second = part.split("The second evening")
    for evening in (first, second):
        told = int(re.search(r"about ([\d,]+) lines", evening)[1].replace(",", ""))
        lines = sum(len(file.read_text().splitlines()) for file in files_of(evening))
        assert abs(lines / told - 1) < 0.05, lines


def files_of(evening):
    """The files that the table of an evening names."""
    files = []
    for row in re.findall(r"^\| \d+ \| (.*?) \|", evening, re.MULTILINE):
        room = PACKAGE
        for name in re.findall(r"`([^`]+)`", row):
            if "/" in name:
                room = (PACKAGE / name).parent
            path = (
                PACKAGE / name if "/" in name or not room.joinpath(name).exists() else room / name
            )
            files += sorted(path.glob("*.py")) if path.is_dir() else [path]
    return files
