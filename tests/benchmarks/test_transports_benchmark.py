"""benchmarks/transports.py: a row for every size and transport, and shared memory in front."""

import sys

import pytest
from commands import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import transports


@pytest.mark.long
@pytest.mark.alone
def test_shared_memory_is_faster_than_gloo_and_takes_no_more_cpu(tmp_path):
    rows = transports.measure((1 << 20, 1 << 23), 5, False, str(tmp_path / "times.pt"))
    by = {(row["message"], row["by"]): row for row in rows}
    assert len(by) == 2 * len(transports.CONTENDERS)
    for message, least in (("1,024 KiB", 2), ("8,192 KiB", 2.5)):
        shared, gloo = by[message, "shared_memory"], by[message, "gloo"]
        assert shared["MB/s, over gloo"] >= least
        assert shared["CPU us"] <= gloo["CPU us"]
