"""What errors and pages say to install keeps the torch that is there."""

import importlib.metadata
import re

import pytest
from commands import ROOT

from titan_dit.ranks.torch_range import pip_install

FREE = ("wandb", "s3fs", "tokenizers", "sentencex", "pre-commit", "scikit-learn", "diffusers")
FREE += ("pyarrow", "titan_dit[text]", "titan_dit[pictures]", "pandas")
"""They need no torch."""
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands_of(text):
    """The packages of every `pip install`, up to the end of the code."""
    for found in re.finditer(r"pip install([^`#&\n]*(?:[`#&\n]|$))", text):
        yield found[1].rstrip("`#&\n").strip(" .,)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_pins_torch_where_a_package_needs_it(page):
    for words in commands_of(page.read_text(encoding="utf-8")):
        packages = [word.strip("'\"") for word in words.split() if word[0] != "-"]
        alone = "--no-deps" in words
        assert "torch==" in words or alone or all(p in FREE for p in packages), words


def test_every_error_gets_its_command_from_one_place():
    version = importlib.metadata.version("torch")
    assert pip_install("'a[b]'") == f"pip install 'a[b]' torch=={version}"
    for file in sorted((ROOT / "titan_dit").rglob("*.py")):
        if file.name != "torch_range.py":
            text = file.read_text(encoding="utf-8").replace(
                "needs a package: pip install wandb", ""
            )
            assert "pip install" not in text, file


@pytest.mark.parametrize("package", [name for name in FREE if "[" not in name])
def test_packages_that_are_free_of_torch_are(package):
    try:
        needs = importlib.metadata.requires(package) or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("not installed")
    assert not [need for need in needs if need.startswith("torch") and "extra ==" not in need]
