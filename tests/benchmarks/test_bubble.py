"""Measured pipeline bubbles of sleeping stages equal those of the simulator."""

import sys

import pytest
from commands import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import bubble


@pytest.mark.long
def test_ranks_wait_as_long_as_the_simulator_says(tmp_path):
    kinds = [("1f1b", 1), ("interleaved_1f1b", 2), ("zbv_zero_bubble", 1)]
    cases = [bubble.Case(name, 4, 4, v, 0.25) for name, v in kinds]
    rows = bubble.measure(cases, 1, str(tmp_path / "times.pt"))
    for row in rows:
        # The overhead of the loop and gloo is about a millisecond per action.
        assert row["step, measured / simulated"] == pytest.approx(1, abs=0.03), row
        assert row["step, torch / own"] == pytest.approx(1, abs=0.03), row
        assert row["peak in streams, torch"] <= row["peak in streams, own"] + 1, row
    for row in rows[:2]:
        assert row["measured / simulated"] == pytest.approx(1, abs=0.03), row
        assert row["idle, simulated"] == pytest.approx(row["theory"], abs=1e-4)
