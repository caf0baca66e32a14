"""benchmarks/chaos.py with a few kills: no sample is lost; a lost sample is detected."""

import importlib.util
import json
import random
import sys

import pytest
from commands import ROOT


@pytest.fixture(scope="module")
def chaos():
    folder = ROOT / "benchmarks"
    sys.path.insert(0, str(folder))
    spec = importlib.util.spec_from_file_location("chaos", folder / "chaos.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(folder))


@pytest.mark.long
def test_kills_lose_nothing_and_change_no_bit(chaos, tmp_path):
    row = chaos.kills(tmp_path, 3, 120, random.Random(0))
    assert row["disturbances"] == "3 SIGKILL of a rank"
    assert (row["samples"], row["lost"], row["twice"], row["strange"]) == (120 * 24, 0, 0, 0)
    assert row["as undisturbed"], row["compared"]

    # It counts the ranks' log lines: without one, samples are missing.
    run = tmp_path / "kills" / "outputs" / "digits"
    file = max((run / "samples-seen").glob("attempt-*/rank-00001.jsonl"))
    lines = file.read_text().splitlines(keepends=True)
    assert json.loads(lines[-1])["step"] == 120
    file.write_text("".join(lines[:-1]))
    assert chaos.account(run, 120)["lost"] == 24
