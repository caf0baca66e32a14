"""benchmarks/collectives.py: its formulas, and counted over theoretical traffic.

test_roofline.py counts what tp and cp send, test_dry_run.py what the other axes do.
"""

import sys

import pytest
from commands import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import collectives

HAND = {
    # 296,832 parameters a layer: gathered in bf16, reduced in fp32, 3/4 of them.
    "2 P (d-1)/d, never resharded": 296_832 * 6 * 3 // 4,
    "3 P (d-1)/d": 296_832 * 8 * 3 // 4,
    "(2 m + 1) P (d-1)/d, m = 4": 296_832 * 20 * 3 // 4,
    "2 P/d (r-1)/r": 296_832 // 2 * 4,
    # 8 samples of 64 tokens, h 128, bf16.
    "(t-1)/t b h (8 s + 12)": 8 * 128 * (8 * 64 + 12) * 2 * 3 // 4,
    "(t-1)/t b h (8 s + 6), whole tokens": 8 * 128 * (8 * 64 + 6) * 2 * 3 // 4,
    "6 (c-1)/c b s h, ring": 8 * 64 * 128 * 16 * 3 // 4,
    "8 (c-1)/c^2 b s h, ulysses": 8 * 8 * 64 * 128 * 2 * 3 // 16,
    "2 b (s+1) h, all ranks": 2 * 8 * 65 * 128 * 2,
}


def test_the_formulas_give_what_is_counted_by_hand():
    found = {case.formula: case.theory(case.ranks) for case in collectives.CASES}
    assert found == HAND


@pytest.mark.parametrize(("per_layer", "ratio"), [(1.0, "1.000"), (1.5, "1.500")])
def test_the_ratio_is_that_of_one_layer_without_the_ends_of_the_network(
    monkeypatch, per_layer, ratio
):
    case = next(case for case in collectives.CASES if case.axis == "tp")
    theory = HAND[case.formula]

    def sent(case, layers):
        return 3 * layers + 5, round(layers * per_layer * theory) + 12_345

    monkeypatch.setattr(collectives, "sent", sent)
    row = collectives.compared(case)
    assert (row["calls"], row["bytes"], row["ratio"]) == ("3", f"{per_layer * theory:,.0f}", ratio)
