"""benchmarks/ring_joins.py counts operators and times every way."""

import sys

import torch
from commands import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import ring_joins

from titan_dit.parallel.ring_attention import add


def test_ways_are_timed_and_their_operators_counted():
    found = ring_joins.rows((1, 2, 8, 4), 1, 1, compiled=False)
    counted = {(row["join"], row["way"]): row["operators"] for row in found}
    assert counted == {
        ("outputs", "before, eager"): 8,
        ("gradients", "before"): 5,
        ("gradients", "eager"): 3,
    }
    assert all(row["CPU us"] > 0 for row in found)


def test_gradients_are_added_as_before_to_the_bit():
    dq, arrived = torch.randn(1, 2, 8, 4), torch.randn(2, 1, 2, 8, 4)
    more, dk, dv = torch.randn(3, 1, 2, 8, 4).bfloat16()
    before = ring_joins.cast_and_add(dq, more, dk, dv, arrived)
    assert all(map(torch.equal, before, add(dq, more, dk, dv, arrived)))
