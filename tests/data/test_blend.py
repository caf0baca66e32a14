"""A blend: shares by weight at any time, epochs of each dataset, pure in the sample number."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from refusals import refused

from titan_dit.data.order import SLOTS, BlendOrder

SIZES = [50, 7, 400]
WEIGHTS = (2.0, 1.0, 5.0)


def blend(sizes=SIZES, weights=WEIGHTS, held_out=(), seed=3):
    return BlendOrder.of(seed, sizes, weights, held_out, "feistel")


def paths_of(rows, sizes=SIZES):
    return np.searchsorted(np.cumsum(sizes), rows, side="right")


def test_every_dataset_has_its_share_at_any_time():
    paths = paths_of(blend().rows(range(4000)))
    for path, weight in enumerate(WEIGHTS):
        share = np.arange(1, 4001) * weight / sum(WEIGHTS)
        assert np.abs(np.cumsum(paths == path) - share).max() < 1.5


def test_every_dataset_has_epochs_in_which_each_row_comes_once():
    rows = np.array(blend().rows(range(SLOTS, SLOTS + 3000)))
    whole = np.array(blend().rows(range(SLOTS + 3000)))
    assert (whole[SLOTS:] == rows).all()
    for path, (first, end) in enumerate(pairwise([0, *np.cumsum(SIZES).tolist()])):
        own = whole[paths_of(whole) == path]
        epochs = [own[i : i + end - first] for i in range(0, len(own), end - first)][:-1]
        assert len(epochs) > 100
        assert all(sorted(epoch) == list(range(first, end)) for epoch in epochs)
        assert (epochs[0] != epochs[1]).any()


def test_a_row_depends_on_its_number_alone():
    numbers = [SLOTS * 3 + 5, 17, SLOTS - 1, 17, 10**12]
    together = blend().rows(numbers)
    assert together == [row for number in numbers for row in blend().rows([number])]
    assert blend(seed=4).rows(range(50)) != blend().rows(range(50))


def test_a_dataset_of_tiny_weight_still_comes():
    counts = blend([3, 3], (1.0, 1e-9)).slots[0]
    assert counts.tolist() == [SLOTS - 1, 1]


def test_held_out_rows_never_come_and_must_leave_some():
    held_out = (3, 49, 50, 56, 100)
    rows = Counter(blend(held_out=held_out).rows(range(5000)))
    assert not rows.keys() & set(held_out)
    assert set(rows) | set(held_out) == set(range(sum(SIZES)))
    message = refused(lambda: blend(held_out=tuple(range(50, 57))))
    assert "paths[1] has 7 windows to train on and 7 held out" in message


@pytest.mark.parametrize("weights", [(1.0, 3.0, 9.0), (0.1, 0.2, 0.7)])
def test_slots_are_all_given_away(weights):
    counts, dataset, number = blend(weights=weights).slots
    assert counts.sum() == len(dataset) == SLOTS
    for path, count in enumerate(counts.tolist()):
        assert number[dataset == path].tolist() == list(range(count))
