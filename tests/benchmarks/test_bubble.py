"""The idle of real pipelines of sleeping stages is what the simulator says."""

import importlib.util
import sys

import pytest
from commands import ROOT


@pytest.fixture(scope="module")
def bubble():
    folder = ROOT / "benchmarks"
    sys.path.insert(0, str(folder))
    spec = importlib.util.spec_from_file_location("bubble", folder / "bubble.py")
    module = sys.modules["bubble"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(folder))


@pytest.mark.alone
def test_ranks_wait_as_long_as_the_simulator_says(bubble, tmp_path):
    kinds = [("1f1b", 1), ("interleaved_1f1b", 2), ("zbv_zero_bubble", 1)]
    cases = [bubble.Case(name, 4, 4, v, 0.25) for name, v in kinds]
    rows = bubble.measure(cases, 1, str(tmp_path / "times.pt"))
    for row in rows:
        # What torch's runtime and gloo take themselves is about a millisecond an action.
        assert row["step, measured / simulated"] == pytest.approx(1, abs=0.03), row
    for row in rows[:2]:
        assert row["measured / simulated"] == pytest.approx(1, abs=0.03), row
        assert row["idle, simulated"] == pytest.approx(row["theory"], abs=1e-4)
