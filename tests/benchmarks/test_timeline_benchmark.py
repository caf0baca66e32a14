"""Real ranks of which one is slow, or a link, or none: the timeline judges each run rightly."""

import statistics
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
    # Median: other processes may hold up a rank or a message in one run.
    texts = [text.read_text().splitlines() for text in tmp_path.glob("*/*.txt")]
    shares = [line.split()[-3] for lines in texts for line in lines if "as it was run" in line]
    assert statistics.median(map(float, shares)) == pytest.approx(1, abs=0.05)


def test_every_rank_and_every_link_of_neighbours_has_its_turn():
    found = list(timeline.runs(20))
    assert len(found) == 60
    assert {run.rank for run in found if run.rank is not None} == {0, 1, 2, 3}
    assert len({run.link for run in found if run.link}) == 6
    assert sum(not any(one is not None for one in run) for run in found) == 20
