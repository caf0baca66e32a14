"""Dropout by sample: a pure function, with the statistics of a fair coin."""

import pytest
import torch
from harness import on_ranks

from titan_dit.models.base import Model
from titan_dit.models.initializers import Independent
from titan_dit.models.sample_dropout import SampleDropout
from titan_dit.parallel.compile import num_graphs
from titan_dit.rng import SampleRNG

KEYS = SampleRNG(0, torch.arange(4)).keys("dropout")
ONES, PLACES = torch.ones(4, 64, 256), torch.arange(64)


def is_kept(rate=0.25, layer=0, place=0, keys=KEYS, positions=PLACES, x=ONES):
    return SampleDropout(rate, layer, place)(x, keys, positions) != 0


@pytest.mark.parametrize("rate", [0.1, 0.25, 0.5, 0.9])
def test_the_share_of_what_is_kept_is_one_minus_the_rate(rate):
    kept = is_kept(rate).double()
    deviation = (rate * (1 - rate)) ** 0.5
    # 5 standard deviations, of all elements and of every sample, token and channel.
    for dims, count in (((), kept.numel()), ((0,), 64 * 256), ((1,), 4 * 256), ((2,), 4 * 64)):
        others = [dim for dim in range(3) if dim not in dims]
        share = kept.mean(others) if dims else kept.mean()
        assert (share - (1 - rate)).abs().max() < 5 * deviation / count**0.5


def correlation(a, b):
    return torch.corrcoef(torch.stack((a.flatten(), b.flatten())).double())[0, 1].abs().item()


def test_masks_of_samples_tokens_channels_layers_and_places_are_independent():
    kept = is_kept()
    pairs = [
        (kept[:-1], kept[1:]),
        (kept[:, :-1], kept[:, 1:]),
        (kept[:, :, :-1], kept[:, :, 1:]),
        (kept, is_kept(layer=1)),
        (kept, is_kept(place=1)),
        (is_kept(layer=1), is_kept(place=1)),
        (kept, is_kept(keys=KEYS + 1)),
    ]
    for a, b in pairs:
        assert correlation(a, b) < 5 / a.numel() ** 0.5


def test_the_mask_is_a_function_of_what_it_names_and_of_nothing_else():
    kept = is_kept()
    assert torch.equal(is_kept(), kept)
    # Any rows, tokens in any order, however they lie in memory.
    assert torch.equal(is_kept(keys=KEYS[2:3], x=ONES[2:3]), kept[2:3])
    order = torch.tensor([40, 3, 17])
    assert torch.equal(is_kept(positions=order, x=ONES[:, :3]), kept[:, order])
    token_first = ONES.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(is_kept(x=token_first), kept)
    assert SampleDropout(0.25, 0)(token_first, KEYS, PLACES).stride() == token_first.stride()


def mixed(word):
    """SplitMix64's two rounds, on Python's integers."""
    for shift, multiplier in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        word = (word ^ (word >> shift)) * multiplier % 2**64
    return word


def test_it_is_the_same_for_ever():
    """A resumed run must draw the masks of the version that began it."""
    keys, positions = torch.tensor([12345]), torch.tensor([0, 70000])
    found = is_kept(0.5, 3, 1, keys, positions, torch.ones(1, 2, 16))[0]
    golden = 0x9E3779B97F4A7C15
    stream = mixed((12345 + (3 * 16 + 1 + 1) * golden) % 2**64)
    for row, position in zip(found.tolist(), positions.tolist(), strict=True):
        numbers = [
            (stream + (16 * position + channel + 1) * golden) % 2**64 for channel in range(16)
        ]
        # As signed numbers these lie from -2**63 up: the lower half is dropped.
        assert row == [mixed(number) < 2**63 for number in numbers]
    assert [int(bit) for bit in found[0]] == [1, 1, 0, 1, 1, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1, 0]


def test_a_rank_of_sequence_parallelism_drops_its_own_tokens():
    layer = SampleDropout(0.25, 0)
    layer.own_tokens = lambda positions: positions[16:32]
    found = layer(ONES[:, 16:32], KEYS, PLACES)
    assert torch.equal(found != 0, is_kept()[:, 16:32])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_is_kept_is_scaled_and_so_is_its_gradient(dtype):
    x = torch.randn(4, 64, 256, dtype=dtype, requires_grad=True)
    y = SampleDropout(0.25, 0)(x, KEYS, PLACES)
    assert y.dtype == dtype
    kept = is_kept()
    torch.testing.assert_close(y, torch.where(kept, x / 0.75, 0))
    weight = torch.randn_like(x)
    (gradient,) = torch.autograd.grad(y, x, weight)
    torch.testing.assert_close(gradient, torch.where(kept, weight / 0.75, 0))
    # 5 standard deviations of a mean of 65,536 elements, each 4/3 or 0.
    assert (SampleDropout(0.25, 0)(ONES, KEYS, PLACES).mean() - 1).abs() < 5 * 0.578 / 256


def test_negative_keys_and_a_rate_of_zero_drop_nothing():
    keys = torch.where(torch.arange(4) == 1, KEYS, -1)
    found = SampleDropout(0.25, 0)(ONES, keys, PLACES)
    assert torch.equal(found[[0, 2, 3]], ONES[1:])
    assert torch.equal(found[1] != 0, is_kept()[1])
    assert SampleDropout(0.0, 0)(ONES, KEYS, PLACES) is ONES


@pytest.mark.parametrize("rate", [-0.1, 1.0])
def test_a_rate_that_is_none_is_refused(rate):
    with pytest.raises(ValueError, match=f"dropout={rate} is no probability below 1"):
        SampleDropout(rate, 0)


def test_a_model_initialises_the_number_of_the_layer():
    model = Model()
    model.blocks = torch.nn.ModuleDict({str(i): SampleDropout(0.1, i) for i in range(3)})
    table = model.initializers()
    assert sorted(table) == [f"blocks.{i}.layer" for i in range(3)]
    for i in range(3):
        initializer = table[f"blocks.{i}.layer"]
        assert isinstance(initializer, Independent)
        assert initializer(torch.Size(()), torch.Generator()).item() == i
    assert not model.state_dict()


def compiled(world):
    """Masks of twelve layers, and the number of graphs."""
    call = torch.compile(SampleDropout.forward, fullgraph=True)
    masks = [call(SampleDropout(0.25, layer), ONES, KEYS, PLACES) != 0 for layer in range(12)]
    return masks, num_graphs()


@pytest.mark.long
@pytest.mark.compiler
def test_compiled_it_draws_the_same_in_one_graph():
    [(masks, graphs)] = on_ranks(1, compiled)
    assert graphs == 1
    for layer, mask in enumerate(masks):
        assert torch.equal(mask, is_kept(layer=layer))
