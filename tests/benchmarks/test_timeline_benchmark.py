"""Real ranks of which one is slow, or a link, or none: the timeline judges each run rightly."""

import sys

import pytest
from commands import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import timeline


@pytest.mark.long
def test_what_is_slow_is_named_and_nothing_else(tmp_path):
    given = "--repeats", "2", "--unit", "0.04", "--cost-steps", "1", "--keep", str(tmp_path)
    rows = timeline.measure(timeline.parsed(given))
    assert len(rows) == 2
    for row in rows:
        assert [row[key] for key in row if key.endswith("right")] == ["2 of 2"] * 3, row
    assert len(list(tmp_path.glob("*/*.png"))) == 2 * 3 * 2
    # Within 5% of the step.
    for text in tmp_path.glob("*/*.txt"):
        as_run = next(line for line in text.read_text().splitlines() if "as it was run" in line)
        assert float(as_run.split()[-3]) == pytest.approx(1, abs=0.05), as_run


def test_every_rank_and_every_link_of_neighbours_has_its_turn():
    found = list(timeline.runs(20))
    assert len(found) == 60
    assert {run.rank for run in found if run.rank is not None} == {0, 1, 2, 3}
    assert len({run.link for run in found if run.link}) == 6
    assert sum(not any(one is not None for one in run) for run in found) == 20
