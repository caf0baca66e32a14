"""Laws of the keyed permutation: one-to-one, uniform, without structure, epochs independent."""

import numpy as np
import pytest
import torch

from titan_dit.data.order import MIN_SIZE, ROUNDS, EpochOrder, Permutation, mix
from titan_dit.rng import words

SIZES = [MIN_SIZE, MIN_SIZE + 1, 66_000, 100_000]
BILLION = 10**9
FACTORED = 31_500 * 31_623
"""A size near a billion without cycle walking."""
# Chi-square minus its degrees of freedom, in standard deviations. All draws are fixed.
LIMIT = 5


def of(seed, number, size):
    return Permutation.of(seed, "test", number, size)


def keys(count, rounds):
    """Keys of `count` permutations at once: arrays [count, 1]."""
    drawn = words(0, "test", torch.arange(count), 2 * rounds).numpy().astype(np.uint64)
    both = drawn[:, ::2] << np.uint64(32) | drawn[:, 1::2]
    return [both[:, i : i + 1] for i in range(rounds)]


def excess(values, bins):
    """How far counts of values in range(bins) are from uniform."""
    counts = np.bincount(np.ravel(values), minlength=bins)
    mean = counts.sum() / bins
    return (((counts - mean) ** 2 / mean).sum() - (bins - 1)) / np.sqrt(2 * (bins - 1))


@pytest.mark.parametrize("size", SIZES)
def test_every_element_comes_once(size):
    for number in range(3):
        assert np.array_equal(np.sort(of(7, number, size)(np.arange(size))), np.arange(size))


@pytest.mark.parametrize("size", [BILLION, BILLION + 7, 2**30, 2**40, 2**40 + 1, 2**62])
def test_parts_of_a_huge_permutation_are_distinct_and_inside(size):
    places = np.unique(np.linspace(0, size - 1, 20_000, dtype=np.int64))
    places = np.union1d(places, np.arange(size - 5_000, size))
    found = of(0, 0, size)(places)
    assert len(np.unique(found)) == len(places)
    assert 0 <= found.min() < size // 1000
    assert size - size // 1000 < found.max() < size


def test_an_element_depends_on_its_place_alone():
    order, places = of(3, 1, BILLION), np.arange(BILLION - 300, BILLION)
    whole = order(places)
    assert [order(places[i : i + 1])[0] for i in range(300)] == whole.tolist()


def test_the_permutation_is_that_of_the_first_release():
    """Old runs must repeat their order."""
    assert of(2**62, 3, BILLION)(np.arange(5)).tolist() == [
        397735942,
        1939463,
        108567598,
        286140617,
        340475217,
    ]
    # SplitMix64 as published: the outputs of seed 1234567.
    assert mix(np.uint64(1234567), np.arange(1, 4, dtype=np.uint64)).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def structure(size, rounds):
    """The worst statistic of neighbours and epochs, of up to 50,000 places."""
    places, a = np.arange(50_000) + (size - 50_000) // 2, Permutation(size, ()).halves[0]
    first, second = (Permutation(size, [k[i, 0] for k in keys(2, rounds)]) for i in range(2))
    worst, base = 0.0, first(places)
    others = [first(places + step) for step in (1, 2, a, a + 1)] + [second(places)]
    for other in others:
        apart = abs(np.corrcoef(base, other)[0, 1]) * np.sqrt(len(places))
        worst = max(worst, apart, excess((other - base) % size * 256 // size, 256))
    return max(worst, excess(base * 256 // size, 256))


def structure_of_keys(size, rounds, count=20_000):
    """The worst statistic of a place and its neighbours, over many permutations."""
    a = Permutation(size, ()).halves[0]
    places = np.array([0, 1, 2, a, a + 1, size - 1], dtype=np.uint64)
    drawn = Permutation(size, keys(count, rounds)).permuted(np.tile(places, (count, 1)))
    found = drawn.astype(np.int64)
    assert size % 256 == 0
    assert found.max() < size
    apart = [(found[:, other] - found[:, 0]) % size for other in range(1, len(places))]
    ends = [bits for v in [*found.T, *apart] for bits in (v * 256 // size, v % 256)]
    return max(excess(bits, 256) for bits in ends)


def test_neighbours_and_epochs_are_unrelated():
    assert structure(FACTORED, ROUNDS) < LIMIT
    assert structure(MIN_SIZE, ROUNDS) < LIMIT
    assert structure_of_keys(MIN_SIZE, ROUNDS) < LIMIT


def test_too_few_rounds_are_seen():
    assert structure(FACTORED, 2) > LIMIT
    assert structure(MIN_SIZE, 2) > LIMIT
    assert structure_of_keys(MIN_SIZE, 2) > LIMIT


def test_epochs_and_seeds_agree_in_one_place_on_average():
    """On both sides of the size from which the network permutes."""
    for size in (1000, MIN_SIZE):
        numbers = range(size)
        orders = [
            np.array(EpochOrder(seed, size).rows(range(epoch * size, (epoch + 1) * size)))
            for seed in range(4)
            for epoch in range(4)
        ]
        assert all(sorted(order.tolist()) == list(numbers) for order in orders[:2])
        agreeing = [(one == other).sum() for i, one in enumerate(orders) for other in orders[:i]]
        # Poisson with mean 1 over 120 pairs.
        assert abs(np.mean(agreeing) - 1) < 4 / np.sqrt(len(agreeing))
        assert abs(np.var(agreeing) - 1) < 0.6
        assert max(agreeing) < 10


def test_few_numbers_are_walked_twice(monkeypatch):
    asked, permuted = [], Permutation.permuted
    monkeypatch.setattr(
        Permutation,
        "permuted",
        lambda self, numbers: (asked.append(len(numbers)), permuted(self, numbers))[1],
    )
    of(0, 0, BILLION)(np.arange(100_000))
    assert sum(asked) < 100_020
