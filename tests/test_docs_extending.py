"""docs/extending.md names the members of classes that users derive from, and their parameters."""

import inspect
import re
from pathlib import Path

import pytest

from titan_dit.data.base import Source
from titan_dit.data.sections import DataConfig
from titan_dit.hooks import Hook
from titan_dit.objectives.base import Objective
from titan_dit.objectives.sections import ObjectiveConfig
from titan_dit.optim.optimizer import Optimizer
from titan_dit.optim.sections import OptimizerConfig

PAGE = (Path(__file__).parents[1] / "docs" / "extending.md").read_text()
TABLES = {
    kind: re.search(rf"\n\| `{kind.__name__}` \|.*?\n\n", PAGE, re.DOTALL)
    for kind in (Source, Objective, ObjectiveConfig, Optimizer, OptimizerConfig)
}
INHERITED = {"section", "step", "checked_rows"}
"""Members that no user overrides without the base class in sight, or that are none of theirs."""


def signature(member):
    """Names of the parameters, without self; None of an attribute."""
    if not inspect.isfunction(member):
        return None
    return list(inspect.signature(member).parameters)[1:]


@pytest.mark.parametrize("kind", [*TABLES, DataConfig, Hook])
def test_the_page_names_every_member(kind):
    missing = [
        name
        for name in vars(kind)
        if not name.startswith("_") and name not in INHERITED
        if not re.search(rf"(`|\.|\] ){name}(`|\(| =)", PAGE)
    ]
    assert not missing


@pytest.mark.parametrize("kind", TABLES)
def test_the_tables_have_the_parameters_of_the_methods(kind):
    first = "".join(row.split("|")[1] for row in TABLES[kind].group().splitlines() if "|" in row)
    written = re.findall(r"`(\w+)\(([^`]*)\)`", first)
    assert written
    for name, arguments in written:
        if arguments != "...":
            names = [each.partition("=")[0] for each in arguments.split(", ") if each]
            assert names == signature(inspect.getattr_static(kind, name)), name
