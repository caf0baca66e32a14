"""benchmarks/scale.py: what it extrapolates and computes, and that docs/scale.md has the same."""

import sys

import pytest
from commands import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import scale
import sockets
from report import table

PAGE = (ROOT / "docs" / "scale.md").read_text()


@pytest.mark.parametrize(
    ("small", "large", "at_1024"),
    [((32, 35), (64, 67), 1027), ((32, 13), (64, 13), 13), ((32, 21), (64, 22), 26)],
)
def test_counts_grow_per_rank_per_doubling_or_not_at_all(small, large, at_1024):
    assert sockets.law(small, large)(1024) == at_1024


def test_ranks_of_a_small_world_are_counted():
    first, other = sockets.count(4)
    assert list(first) == ["start", "first step", "first checkpoint"]
    assert first["start"] - other["start"] >= 4, "rank 0 holds the store"
    assert all(counts["start"] < counts["first step"] for counts in (first, other))


def test_a_rank_belongs_to_as_many_groups_as_the_page_says():
    for num_ranks in (8, 1024):
        row = scale.group_row(scale.LAYOUTS[num_ranks], num_ranks)
        *said, _ = row.values()
        assert "| " + " | ".join(map(str, said)) + " |" in PAGE


def test_the_page_has_the_limits_and_hops_of_the_code():
    for rows in (scale.limit_row, scale.stop_row):
        assert table([rows(n) for n in scale.WORLDS]) in PAGE


def test_the_page_has_the_pipelines_of_the_code():
    rows = [scale.pipeline_row(*case) for case in scale.PIPELINES]
    assert table(rows) in PAGE
    # Forward and backward of each microbatch, to and from each of two neighbours.
    assert rows[0]["messages that a rank sends"] == 2 * scale.MICROBATCHES


def test_more_nodes_send_more_to_the_rendezvous_and_are_lost_later():
    few, many = scale.rendezvous_row(32), scale.rendezvous_row(10_000)
    assert few["a node is lost after"] == "12 s"
    assert many["a node is lost after"] == "60 s"
    assert float(many["MB/s at the host"]) < 100
