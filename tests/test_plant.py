"""Bugs planted in a toy package: which test catches each; rows that do not fit are refused."""

import ast
import json
import sys
from contextlib import closing
from dataclasses import replace

import pytest
from commands import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import draw_mutants
import plant
from plant_rows import Plant, PlantError, find, planted, prepare, read_plants
from plant_runner import Runner

SPANS = '''"""Spans."""

SLACK = 0


class Span:
    """From first to end."""

    def __init__(self, first, end):
        self.first, self.end = first, end

    def width(self):
        """The numbers in it; not one more, not 2."""
        assert self.first + 0 <= self.end, "from 1 to 2"
        if self.end < self.first + 2:
            raise ValueError(f"{self.end - self.first} is too few")
        return max(self.end - self.first, 0) + SLACK


def width(span):
    return span.width()
'''
TESTS = """from titan_dit.plan import Span, width


def test_a_span_is_as_wide_as_its_numbers():
    assert width(Span(2, 6)) == 4
"""
ROW = Plant(
    name="too-wide",
    symbol="Span.width",
    old="self.end - self.first, 0",
    new="self.end + self.first, 0",
    why="Spans grow.",
    origin="a test",
)


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A package with tests; pytest runs there without torch and the environment's plugins."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setattr(plant, "Runner", lambda: Runner(["pytest"]))
    files = {"titan_dit/__init__.py": "", "titan_dit/plan.py": SPANS, "tests/test_plan.py": TESTS}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def write_rows(tree, *rows):
    lines = []
    for row in rows:
        values = {**vars(row), "tests": list(row.tests)}
        lines += ["[[plant]]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    (tree / "tests" / "plants.toml").write_text("\n".join(lines))


def test_every_bug_is_told_with_who_caught_it(tree, capsys):
    write_rows(
        tree,
        ROW,
        replace(ROW, name="dies", old="return max(", new="__import__('os')._exit(3)\n        max("),
        replace(ROW, name="no-import", symbol="SLACK", old="= 0", new="= nothing"),
        replace(ROW, name="harmless", old=", 0)", new=", -1)", survives="no span has a width < 0"),
        replace(ROW, name="unseen", old="self.first + 2", new="self.first + 3", why="Too strict."),
    )
    found = tree / "found.json"
    assert plant.main(["--json", str(found)], tree) == 1
    by_name = {row["name"]: (row["verdict"], row["by"]) for row in json.loads(found.read_text())}
    test = "tests/test_plan.py::test_a_span_is_as_wide_as_its_numbers"
    assert by_name == {
        "too-wide": ("caught", test),
        "dies": ("crashed", "pytest's exit code 3"),
        "no-import": ("caught", "tests/test_plan.py"),
        "harmless": ("survived", ""),
        "unseen": ("survived", ""),
    }
    said = capsys.readouterr().out
    assert "unseen: nothing caught it. Too strict." in said
    assert "no bug: no span has a width < 0" in said
    assert "harmless: nothing caught it" not in said
    assert "4 of 5 caught or no bugs" in said
    # Only copies were changed.
    assert (tree / "titan_dit" / "plan.py").read_text() == SPANS


def test_what_a_log_calls_an_error_has_caught_nothing():
    output = "ERROR    torch:logger.py:96 {}\n=== short test summary info ===\nFAILED a.py::b - c\n"
    assert plant.failures(output) == ["a.py::b"]


def test_tests_that_fail_anyway_catch_nothing(tree, capsys):
    (tree / "tests" / "test_plan.py").write_text(TESTS.replace("== 4", "== 5"))
    write_rows(tree, ROW)
    assert plant.main([], tree) == 1
    assert "not judged" in capsys.readouterr().out


def test_a_test_that_hangs_is_ended_and_named_as_such(tree):
    (tree / "tests" / "test_plan.py").write_text("import time\n\ntime.sleep(600)\n")
    with closing(Runner(["pytest"])) as runner:
        outcome, _ = plant.run_tests(runner, tree, ["tests/test_plan.py"], timeout=0.5)
    assert (outcome.verdict, outcome.by) == ("timed out", "after 0.5 s")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"symbol": "Span.height"}, "Span.height is not in titan_dit"),
        ({"symbol": "width"}, "width is in 2 places: titan_dit.plan.Span.width (line 12), "),
        ({"old": "self.start"}, "has the text 'self.start' 0 times, not once"),
        ({"old": "self.end"}, "has the text 'self.end' 4 times, not once"),
        ({"new": "(self.end - self.first, 0"}, "with the bug does not parse"),
        ({"tests": ("tests/test_other.py",)}, "test tests/test_other.py does not exist"),
    ],
)
def test_a_row_that_does_not_fit_is_one_clear_error(tree, capsys, change, words):
    write_rows(tree, replace(ROW, **change))
    assert plant.main([], tree) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: too-wide: ")
    assert words in said
    assert "Traceback" not in said


def test_a_module_before_the_name_makes_it_unique(tree):
    assert find(tree, "plan.width").first == 20
    place = find(tree, "Span.width")
    assert (place.first, place.last) == (12, 17)
    changed = planted(ROW, place)
    assert changed == SPANS.replace("max(self.end - self", "max(self.end + self")


def test_a_key_that_no_row_has_and_a_name_twice_are_refused(tree):
    file = tree / "tests" / "plants.toml"
    file.write_text('[[plant]]\nname = "a"\nplace = "b"\n')
    with pytest.raises(PlantError, match=r"plants.toml, a: .*place"):
        read_plants(file)
    write_rows(tree, ROW, ROW)
    with pytest.raises(PlantError, match="has too-wide twice"):
        read_plants(file)


def test_mutants_are_the_same_for_the_same_seed_and_change_one_place_each(tree):
    package = tree / "titan_dit"
    drawn = draw_mutants.draw(package, 3, seed=1)
    assert drawn == draw_mutants.draw(package, 3, seed=1)
    others = {tuple(draw_mutants.draw(package, 1, seed)) for seed in range(20)}
    assert len(others) > 5
    every = [
        m
        for found in draw_mutants.mutants_by_line(package / "plan.py", "plan").values()
        for m in found
    ]
    assert {m.what for m in every} == {
        "condition negated", "< -> <=", "+ -> -", "2 -> 3", "2 -> 1",
        "max -> min", "arguments swapped", "- -> +", "0 -> 1", "0 -> -1",
    }  # fmt: skip
    rows = draw_mutants.rows(every, seed=1)
    (tree / "tests" / "plants.toml").write_text(rows)
    read = read_plants(tree / "tests" / "plants.toml")
    # Each stands once in its symbol and parses; docstring, message and assertion are left alone.
    assert len(prepare(tree, read)) == len(every)
    assert not any(
        "assert" in row.old or "raise" in row.old or "not one" in row.old for row in read
    )


def test_every_row_of_our_own_list_fits_the_code():
    plants = read_plants(ROOT / "tests" / "plants.toml")
    assert len(prepare(ROOT, plants)) == len(plants) > 90
    named = {test for row in plants for test in row.tests if "::" in test}
    trees = {
        file: ast.parse((ROOT / file).read_text()) for file in {t.partition("::")[0] for t in named}
    }
    for file, _, name in (test.partition("::") for test in named):
        functions = {f.name: f for f in trees[file].body if isinstance(f, ast.FunctionDef)}
        marks = map(ast.unparse, functions[name.partition("[")[0]].decorator_list)
        assert "pytest.mark.long" not in marks, f"{name} does not run without --long"


def test_a_bug_is_planted_in_a_file_that_is_not_python(tmp_path):
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "job.sh").write_text("set -eu\ntrap stop TERM\n")
    row = replace(ROW, symbol="launch/job.sh", old="trap stop TERM", new=":", tests=("launch",))
    file, source, tests = prepare(tmp_path, [row])["too-wide"]
    assert (str(file), source, tests) == ("launch/job.sh", "set -eu\n:\n", ("launch",))
    with pytest.raises(PlantError, match=r"launch/other.sh does not exist"):
        prepare(tmp_path, [replace(row, symbol="launch/other.sh")])
