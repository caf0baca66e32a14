"""benchmarks/encode.py on the example pictures."""

import json
import subprocess
import sys

import pytest
from commands import ROOT


@pytest.mark.long
def test_the_shares_of_encoding_and_of_training_are_measured(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks" / "encode.py"), "--steps", "15"]
    subprocess.run([*command, "--out", str(tmp_path / "out.json")], check=True)
    encoding, training = json.loads((tmp_path / "out.json").read_text())["rows"]
    busy, waits = (float(row["share"].split()[-1]) for row in (encoding, training))
    assert "3,786 pictures" in encoding["what"]
    assert 0.5 < busy <= 1
    assert training["what"].startswith("5 steps")
    assert 0 < waits < 0.5
