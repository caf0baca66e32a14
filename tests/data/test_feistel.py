"""Laws of the keyed permutation: one-to-one, uniform, without structure, epochs independent."""

import numpy as np
import pytest
import torch

from titan_dit.data.feistel import Permutation, mix, rounds_for
from titan_dit.rng import words

SIZES = [*range(1, 70), 97, 100, 1797, 4096, 4097, 65_537, 100_000]
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


def elements(size, count, rounds):
    """Permutations [count, size] of a size that needs no cycle walking."""
    order = Permutation(size, keys(count, rounds))
    assert np.prod(order.halves) == size
    return order.permuted(np.tile(np.arange(size, dtype=np.uint64), (count, 1))).astype(np.int64)


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
    assert of(0, 0, 12)(np.arange(12)).tolist() == [0, 11, 9, 2, 5, 6, 1, 7, 3, 8, 4, 10]
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


@pytest.mark.parametrize("size", [3, 4])
def test_all_orders_of_a_few_rows_are_equally_likely(size):
    """Of 3, with cycle walking; of 4, where all 24 must be reached."""
    if size == 3:
        seen = np.array([of(0, number, 3)(np.arange(3)) for number in range(240)])
    else:
        seen = elements(4, 20_000, rounds_for(4))
    codes = (seen * size ** np.arange(size)).sum(1)
    _, index = np.unique(codes, return_inverse=True)
    assert index.max() + 1 == np.prod(np.arange(1, size + 1))
    assert excess(index, index.max() + 1) < LIMIT


def structure(size, count, rounds):
    """The worst of several statistics over many permutations of a small size."""
    found, b = elements(size, count, rounds), Permutation(size, ()).halves[0]
    positions = max(excess(found[:, place], size) for place in range(size))
    pairs = [found[:, 0] * size + found[:, other] for other in (1, b, b + 1)]
    pairs = [np.unique(pair, return_inverse=True)[1] for pair in pairs]
    steps = [(found[:, k] - found[:, 0] - 1) % size for k in (1, b)]
    return max(
        positions,
        *(excess(pair, size * (size - 1)) for pair in pairs),
        *(excess(step, size - 1) for step in steps),
    )


@pytest.mark.parametrize(
    ("size", "count"), [(6, 20_000), (12, 20_000), (30, 20_000), (132, 20_000)]
)
def test_small_permutations_are_uniform_in_every_place_and_pair(size, count):
    assert structure(size, count, rounds_for(size)) < LIMIT


def large_structure(rounds):
    """The worst statistic of neighbours and epochs, of 50,000 places of a billion."""
    size, places = FACTORED, np.arange(50_000) + FACTORED // 2
    first, second = (Permutation(size, [k[i, 0] for k in keys(2, rounds)]) for i in range(2))
    worst, base = 0.0, first(places)
    others = [first(places + step) for step in (1, 2, 31_623, 31_624)] + [second(places)]
    for other in others:
        apart = abs(np.corrcoef(base, other)[0, 1]) * np.sqrt(len(places))
        worst = max(worst, apart, excess((other - base) % size * 256 // size, 256))
    return max(worst, excess(base * 256 // size, 256))


def test_neighbours_and_epochs_of_a_billion_rows_are_unrelated():
    assert large_structure(rounds_for(FACTORED)) < LIMIT


def test_too_few_rounds_are_seen():
    assert rounds_for(BILLION) == 8
    assert large_structure(2) > LIMIT
    for size in (6, 12, 30):
        assert structure(size, 5_000, 4) > LIMIT


def test_epochs_and_seeds_agree_in_one_place_on_average():
    orders = [of(seed, number, 1000)(np.arange(1000)) for seed in range(8) for number in range(8)]
    agreeing = [(one == other).sum() for i, one in enumerate(orders) for other in orders[:i]]
    # Poisson with mean 1 over 2,016 pairs.
    assert abs(np.mean(agreeing) - 1) < 4 / np.sqrt(len(agreeing))
    assert abs(np.var(agreeing) - 1) < 0.2
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
