"""A plan from measured costs is as much faster on ranks as the simulator says."""

import sys

import pytest
from commands import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import order_plans


@pytest.mark.long
@pytest.mark.timeout(600)
def test_ranks_gain_what_a_plan_promises():
    cases = ("even", "video lengths", "every link a forward late")
    rows = order_plans.measure(
        order_plans.parsed(["--unit", "0.1", "--repeats", "2", "--cases", *cases])
    )
    gains = {(row["case"], row["memory"]): row for row in rows}
    for row in rows:
        assert row["gain, measured"] == pytest.approx(row["gain, simulated"], rel=0.06), row
    assert gains["even", 1.0]["gain, simulated"] == 1
    assert gains["video lengths", 1.5]["gain, measured"] > 1.1
    assert gains["every link a forward late", 1.5]["gain, measured"] > 1.25
