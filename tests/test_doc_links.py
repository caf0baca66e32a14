"""Links and quoted messages of the documentation."""

import ast
import contextlib
import importlib.util
import re

import pytest
from commands import ROOT

from titan_dit.config import catalog, config_file

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "benchmarks" / "README.md"])


def anchors(page):
    """GitHub's anchors of a page's headings."""
    titles = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title.lower()) for title in titles]
    return {re.sub(r"[^\w\- ]", "", title).strip().replace(" ", "-") for title in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        found = page.parent / file if file else page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), target


def messages():
    """All texts of the package, the shell scripts included; values of f-strings are blanks."""
    texts = [(ROOT / name).read_text() for name in ("scripts/environment.sh", "run_train.sh")]
    for file in (ROOT / "titan_dit").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [
                    part.value if isinstance(part, ast.Constant) else "\0" for part in node.values
                ]
                texts.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


def test_messages_that_troubleshooting_quotes_exist():
    """The words of a quote between its values, where three or more stand together."""
    page, known = (ROOT / "docs" / "troubleshooting.md").read_text(), messages()
    quotes = re.findall(r"^\| (`[^|]*`)[^|]* \|", page, re.MULTILINE)
    words = [
        " ".join(run)
        for quote in re.findall(r"`([^`]+)`", "\n".join(quotes))
        for run in runs_of_words(quote)
    ]
    assert len(words) > 20
    assert [run for run in words if run not in known] == []


def test_troubleshooting_begins_with_ten_errors_their_causes_and_commands():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    section = page.partition("## The ten most likely errors")[2].partition("\n## ")[0]
    assert page.index("## The ten") < page.index("## Exit codes")
    rows = [re.split(r" \| ", row[2:-2]) for row in section.splitlines() if row.startswith("| `")]
    assert [len(row) for row in rows] == [3] * 10
    latents = ["--config", "digits", "--data.name", "latents", "--data.path", "set"]
    config = config_file.load(latents, catalog.variant)
    for message, _, command in rows:
        assert message.startswith("`"), message
        assert "`" in command, command
        for name, key in re.findall(r"--(\w+)\.(\w+)", command):
            assert hasattr(getattr(config, name), key), key


def runs_of_words(quote):
    """Three or more plain words in a row."""
    run = []
    for word in [*quote.split(), ""]:
        if re.fullmatch(r"[a-z][a-z'-]*[.,;]?", word):
            run.append(word)
        else:
            if len(run) > 2:
                yield run
            run = []


def names_of(example):
    """(module, name) of everything that an example imports from the package."""
    for node in ast.walk(ast.parse(example)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("titan_dit"):
            yield from ((node.module, alias.name) for alias in node.names)


def test_the_examples_in_python_import_what_exists():
    found = set()
    for page in PAGES:
        for example in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
            with contextlib.suppress(SyntaxError):  # A line of a table, not a program.
                found |= set(names_of(example))
    assert len(found) > 20
    for module, name in sorted(found):
        made = importlib.import_module(module)
        is_there = hasattr(made, name) or importlib.util.find_spec(f"{module}.{name}")
        assert is_there, f"from {module} import {name}"
