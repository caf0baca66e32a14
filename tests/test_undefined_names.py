"""Names that nothing defines: linters ignore them, for the sake of jaxtyping's strings."""

import ast
import json
import subprocess
import sys
from pathlib import Path

from commands import ROOT

FOLDERS = ("titan_dit", "benchmarks", "examples", "scripts", "tests")
RUFF = (sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache")


def undefined_names(folder, *parts):
    """ "file:line name" of each undefined name that does not stand in a string."""
    words = (*RUFF, "--select=F821", "--output-format=json", *parts)
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    found = []
    for entry in json.loads(done.stdout):
        file, at = Path(entry["filename"]), entry["location"]
        if not in_string(file.read_text(), at["row"], at["column"] - 1):
            name = entry["message"].split("`")[1]
            found.append(f"{file.relative_to(folder)}:{at['row']} {name}")
    return found


def in_string(source, row, column):
    """True if a place of the source, in characters, lies in a string."""
    place = row, len(source.splitlines()[row - 1][:column].encode())
    return any(
        (node.lineno, node.col_offset) <= place < (node.end_lineno, node.end_col_offset)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def test_every_name_is_defined():
    assert undefined_names(ROOT, *FOLDERS) == []


def test_a_missing_import_is_found_and_a_shape_is_none(tmp_path):
    source = (
        "from jaxtyping import Float\n"
        "from torch import Tensor\n"
        'def ä(x: Float[Tensor, "b *n"], y: Missing) -> Float[Tensor, "b"]:\n'
        '    "ä", torch.ones_like(x)\n'
    )
    (tmp_path / "planted.py").write_text(source)
    assert undefined_names(tmp_path, "planted.py") == ["planted.py:3 Missing", "planted.py:4 torch"]
