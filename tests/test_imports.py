"""The imports of the tests' fork server, in a new Python."""

import subprocess
import sys

import pytest
from commands import environment
from preload import MODULES


@pytest.mark.long
@pytest.mark.parametrize("module", [name for name in MODULES if name.startswith("titan_dit")])
def test_a_module_is_imported_by_itself_and_in_silence(module, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", f"import {module}"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
