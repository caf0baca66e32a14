import math

import pytest
import torch

from titan_dit.rng import MASK, SampleRNG, permutation, philox, to_unit, words

ONES = 0xFFFFFFFF
# Random123's kat_vectors, philox4x32 with 10 rounds.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def kolmogorov(values, cdf):
    """sqrt(n) times the largest CDF distance; 1.95 has p = 0.001."""
    values = values.flatten().double().sort().values
    n = len(values)
    expected, steps = cdf(values), torch.arange(n + 1, dtype=torch.float64) / n
    return math.sqrt(n) * max((steps[1:] - expected).max(), (expected - steps[:-1]).max()).item()


def normal_cdf(x):
    return 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def correlation(a, b):
    return torch.corrcoef(torch.stack((a.flatten(), b.flatten())).double())[0, 1].abs().item()


def test_the_keys_of_samples_are_numbers_of_63_bits():
    numbers = torch.arange(1000)
    keys = SampleRNG(3, numbers).keys("dropout")
    assert (keys.dtype, len(keys.unique())) == (torch.int64, 1000)
    assert keys.min() >= 0
    # Every bit is set in half of them: 5.2 standard deviations.
    share = torch.stack([(keys >> bit & 1).double().mean() for bit in range(63)])
    assert (share - 0.5).abs().max() < 5.2 * 0.5 / 1000**0.5
    assert torch.equal(SampleRNG(3, numbers[7:9]).keys("dropout"), keys[7:9])
    for other in (SampleRNG(4, numbers).keys("dropout"), SampleRNG(3, numbers).keys("mask")):
        assert not (other == keys).any()


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_gives_its_authors_known_answers(counter, key, expected):
    lanes = philox(tuple(torch.tensor([word]) for word in counter), key)
    assert tuple(lane.item() for lane in lanes) == expected


def test_words_stay_below_two_to_the_32_and_use_every_bit():
    drawn = words(3, "bits", torch.arange(64), 64)
    assert drawn.min() >= 0
    assert drawn.max() <= MASK
    share = torch.stack([(drawn >> bit & 1).float().mean() for bit in range(32)])
    assert (share - 0.5).abs().max() < 5 * 0.5 / 64


@pytest.mark.parametrize("stream", ["t", "noise", "label_dropout", "sample"])
def test_uniforms_are_uniform(stream):
    drawn = SampleRNG(0, torch.arange(500)).uniform(stream, (100,))
    assert kolmogorov(drawn, lambda x: x) < 1.95


@pytest.mark.parametrize("stream", ["t", "noise", "sample"])
def test_normals_are_normal(stream):
    drawn = SampleRNG(0, torch.arange(500)).normal(stream, (100,)).double()
    assert kolmogorov(drawn, normal_cdf) < 1.95
    n = drawn.numel()
    assert abs(drawn.mean().item()) < 4 / math.sqrt(n)
    assert abs(drawn.square().mean().item() - 1) < 4 * math.sqrt(2 / n)
    assert abs(drawn.pow(3).mean().item()) < 4 * math.sqrt(15 / n)
    assert abs(drawn.pow(4).mean().item() - 3) < 4 * math.sqrt(96 / n)


def test_one_draw_per_sample_is_normal_too():
    # A single draw discards half of its Box-Muller pair.
    assert kolmogorov(SampleRNG(1, torch.arange(20_000)).normal("t"), normal_cdf) < 1.95


def test_the_two_normals_of_a_pair_are_independent():
    even, odd = (
        SampleRNG(0, torch.arange(300)).normal("noise", (200,)).unflatten(1, (-1, 2)).unbind(2)
    )
    bound = 4 / math.sqrt(even.numel())
    assert correlation(even, odd) < bound
    # They share a radius: a wrong one would correlate the squares.
    assert correlation(even.square(), odd.square()) < bound


def test_uniforms_lie_strictly_inside_zero_and_one():
    ends = to_unit(torch.tensor([0, MASK]))
    assert ends.tolist() == [2.0**-24, 1 - 2.0**-24]
    assert ends.logit().isfinite().all()


@pytest.mark.parametrize("method", ["uniform", "normal"])
def test_draws_do_not_depend_on_the_split_into_ranks_and_microbatches(method):
    numbers = torch.arange(1000, 1012)
    whole = getattr(SampleRNG(7, numbers), method)("noise", (3, 5))
    for parts in (2, 3, 12):
        split = [
            getattr(SampleRNG(7, part), method)("noise", (3, 5)) for part in numbers.chunk(parts)
        ]
        assert torch.equal(torch.cat(split), whole)
    shuffled = torch.tensor([5, 0, 11, 3, 8, 1, 10, 2, 7, 4, 9, 6])
    assert torch.equal(
        getattr(SampleRNG(7, numbers[shuffled]), method)("noise", (3, 5)), whole[shuffled]
    )


@pytest.mark.parametrize("method", ["uniform", "normal"])
@pytest.mark.parametrize("first", range(9))
def test_any_slice_of_a_sample_is_that_slice_of_the_whole_draw(method, first):
    draw = getattr(SampleRNG(7, torch.tensor([3, 2**40])), method)
    whole = draw("noise", (23,))
    for count in range(1, 23 - first):
        assert torch.equal(draw("noise", (count,), first=first), whole[:, first : first + count])


@pytest.mark.parametrize("method", ["uniform", "normal"])
def test_a_range_of_tokens_is_a_slice_in_row_major_order(method):
    draw = getattr(SampleRNG(7, torch.arange(4)), method)
    assert torch.equal(draw("noise", (2, 3), first=5 * 3), draw("noise", (8, 3))[:, 5:7])


def test_a_shape_is_only_a_view_of_the_same_draw():
    rng = SampleRNG(0, torch.arange(3))
    assert torch.equal(rng.normal("noise", (4, 6)).flatten(1), rng.normal("noise", (24,)))
    assert rng.normal("t").shape == rng.uniform("t").shape == (3,)


OTHERS = {
    "seed": (SampleRNG(1, torch.arange(100)), "noise", 0),
    "stream": (SampleRNG(0, torch.arange(100)), "noise2", 0),
    "sample": (SampleRNG(0, torch.arange(100, 200)), "noise", 0),
    # The high words of the two 64-bit counters, which a short run never reaches.
    "sample beyond 2**32": (SampleRNG(0, torch.arange(100) + 2**32), "noise", 0),
    "element": (SampleRNG(0, torch.arange(100)), "noise", 400),
    "element beyond 2**34": (SampleRNG(0, torch.arange(100)), "noise", 2**34),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS.keys())
def test_another_seed_stream_sample_or_element_is_uncorrelated(other):
    rng, stream, first = other
    a = SampleRNG(0, torch.arange(100)).normal("noise", (400,))
    b = rng.normal(stream, (400,), first=first)
    assert correlation(a, b) < 4 / math.sqrt(a.numel())
    assert (a == b).float().mean() < 1e-3


def test_neighbouring_samples_are_uncorrelated():
    drawn = SampleRNG(0, torch.arange(64)).normal("noise", (4096,))
    off_diagonal = torch.corrcoef(drawn) - torch.eye(64)
    assert off_diagonal.abs().max() < 5 / math.sqrt(4096)


def test_the_draws_are_those_of_the_first_release():
    # Frozen: a change here breaks the resume of every existing run.
    rng = SampleRNG(0, torch.tensor([0, 123_456_789_012]))
    uniform = [
        [0.5579790472984314, 0.5965897440910339, 0.9420718550682068],
        [0.31702643632888794, 0.5952027440071106, 0.44024914503097534],
    ]
    normal = [[-0.2084745, 0.0240663, 0.6107752], [1.1990515, 0.3759129, -0.9558305]]
    torch.testing.assert_close(rng.uniform("t", (3,)), torch.tensor(uniform), rtol=0, atol=0)
    torch.testing.assert_close(rng.normal("noise", (3,)), torch.tensor(normal), rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 7, 1797])
def test_every_epoch_is_a_permutation(size):
    for epoch in (0, 1, 1000):
        assert permutation(5, epoch, size).sort().values.tolist() == list(range(size))


def test_permutations_differ_between_epochs_and_seeds():
    orders = [permutation(seed, epoch, 1000) for seed in (0, 1) for epoch in (0, 1, 2)]
    for i, a in enumerate(orders):
        for b in orders[:i]:
            # Two unrelated permutations agree in one place on average.
            assert (a == b).sum() < 10


def test_all_orders_are_equally_frequent():
    seen = [tuple(permutation(0, epoch, 3).tolist()) for epoch in range(1200)]
    counts = [seen.count(order) for order in set(seen)]
    assert len(counts) == 6
    assert sum((count - 200) ** 2 / 200 for count in counts) < 20.5  # chi2 of 5, p = 0.001


def test_the_permutation_is_that_of_the_first_release():
    # Frozen: a resumed run must keep its data order.
    assert permutation(0, 0, 12).tolist() == [5, 8, 10, 2, 0, 1, 3, 9, 11, 4, 7, 6]
    assert permutation(2**62, 3, 12).tolist() == [6, 4, 9, 8, 0, 1, 7, 5, 3, 2, 10, 11]
