"""benchmarks/step.py: order of turns, warm-up, and ratios."""

import sys
from types import SimpleNamespace

import torch
from commands import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import step


def test_ratios_are_medians_turn_by_turn_and_the_first_turn_is_not_kept(monkeypatch):
    """On a machine that slows down tenfold, the ratio of medians would be wrong."""
    now, order = [0.0], []
    clock = SimpleNamespace(process_time=lambda: now[0], perf_counter=lambda: 2 * now[0])
    monkeypatch.setattr(step, "time", clock)

    def contender(name, seconds):
        turns = iter(seconds)

        def take():
            order.append(name)
            now[0] += next(turns)
            return torch.ones(())

        return take

    steps = {
        "plain": contender("plain", [100, 1, 10, 20]),
        "ours": contender("ours", [900, 0.5, 6, 16]),
    }
    seconds = step.measure(steps, 3)
    assert order == ["plain", "ours", "ours", "plain", "plain", "ours", "ours", "plain"]
    plain, ours = step.table(seconds)
    assert (plain["CPU s"], plain["wall s"], plain["CPU / plain"]) == ("10.000", "20.000", "1.000")
    assert (ours["CPU s"], ours["wall / plain"], ours["CPU / plain"]) == ("6.000", "0.600", "0.600")
