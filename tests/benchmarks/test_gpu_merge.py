"""Several runs of gpu.py as one report: the shipped results of an H200."""

import json
import sys

import pytest
from commands import ROOT

from titan_dit.config.section import UserError

sys.path.insert(0, str(ROOT / "benchmarks"))
import gpu_merge

RESULTS = ROOT / "benchmarks" / "results" / "h200-2026-11-26"


@pytest.fixture(scope="module")
def runs():
    return [json.loads((RESULTS / f"gpu-{number}.json").read_text()) for number in (1, 2, 3)]


def test_the_shipped_report_is_that_of_its_runs(runs):
    found, shipped = gpu_merge.merged(runs, None), json.loads((RESULTS / "gpu.json").read_text())
    for name in ("rows", "measured", "levers", "targets", "verdicts", "failed"):
        assert json.loads(json.dumps(getattr(found, name))) == shipped[name], name
    assert len(shipped["measured"]) == sum(len(run["measured"]) for run in runs)


def test_a_step_that_was_measured_again_has_rounds_and_of_other_rows_the_last_counts(runs):
    again = json.loads(json.dumps(runs[2]))
    again["levers"][0]["ms"]["eager"] = 7.0
    found = gpu_merge.merged([*runs, again], None)
    ours = [row for row in found.rows if row["contender"] == "ours_compiled"]
    assert [row["by round"].count("/") for row in ours if row["tokens"] == 1024] == [0, 3]
    assert [row["ms"]["eager"] for row in found.levers if row["lever"] == "ring joins"] == [7.0]


def test_runs_of_two_devices_are_refused(runs):
    with pytest.raises(UserError, match=r"device: NVIDIA H100, NVIDIA H200\. Merge runs"):
        gpu_merge.merged([runs[0], runs[1] | {"device": "NVIDIA H100"}], None)
