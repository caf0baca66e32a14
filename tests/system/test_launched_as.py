"""A process's place among the ranks, by the variables of its launch."""

import pytest

from titan_dit.system.launched_as import LaunchedAs


def test_without_a_launcher_or_with_empty_variables_it_is_one_rank_of_one(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "")
    here = LaunchedAs.here()
    assert (here.is_rank, here.rank, here.world_size, here.local_world_size) == (False, 0, 1, 1)
    assert here.is_first


def test_a_variable_that_is_no_number_is_one_line(monkeypatch):
    monkeypatch.setenv("RANK", "abc")
    with pytest.raises(SystemExit, match=r"error: RANK=abc is no rank .* Unset it"):
        LaunchedAs.here()
