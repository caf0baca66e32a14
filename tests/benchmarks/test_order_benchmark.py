"""benchmarks/order.py on few rows."""

import sys

from commands import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import order

from titan_dit.data.order import EpochOrder


def test_costs_are_per_row_of_the_dataset():
    row = order.row_of("a", 1000, (0.002, 4000))
    assert (row["ns/row"], row["B/row"]) == ("2000.0", "4.00")


def test_every_way_is_measured(tmp_path):
    rows = list(order.costs(200_000, 300_000, tmp_path))
    assert [row["what"].split(",")[0] for row in rows].count("50") == 3
    # Sorting needs memory for all rows; the rest of a process is some MiB.
    assert float(rows[0]["B/row"]) > 20
    assert order.batch_us(EpochOrder(0, 10**9), 8, turns=1) > 0
