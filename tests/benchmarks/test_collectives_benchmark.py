"""benchmarks/collectives.py: an axis sends what its formula says, to the byte."""

import json
import sys

import pytest
from commands import ROOT, run

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


@pytest.mark.parametrize("case", collectives.CASES, ids=lambda case: case.formula)
def test_the_formulas_give_what_is_counted_by_hand(case):
    assert case.theory(case.ranks) == HAND[case.formula]


def test_what_is_sent_is_what_theory_says(tmp_path):
    """One axis: the others are held to theory in test_dry_run.py, too."""
    command = [sys.executable, ROOT / "benchmarks" / "collectives.py", "--out", "out.json"]
    done = run([*command, "--axes", "tp"], tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["axis"] for row in rows] == ["tp", "tp"]
    assert [row["bytes"] for row in rows] == [f"{HAND[row['elements']]:,}" for row in rows]
    assert {row["ratio"] for row in rows} == {"1.000"}
