"""Grouped queries and rotary positions in the attention layer."""

import math

import pytest
import torch

from titan_dit.models.layers import Attention, attend, rotary_of, rotate


def layer_of(groups, **options):
    torch.manual_seed(0)
    return Attention(32, 4, num_key_value_heads=groups, mask="causal", **options).double()


def tokens(n=6):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, n, 32, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_a_group_per_head_is_the_layer_as_it_was_to_the_bit(qk_norm):
    plain, grouped = layer_of(0, qk_norm=qk_norm), layer_of(4, qk_norm=qk_norm)
    assert plain.qkv.weight.shape == (96, 32)
    x = tokens()
    assert torch.equal(plain(x), grouped(x))
    # The layout of a checkpoint from before there were groups.
    q, k, v = plain.qkv(x).unflatten(-1, (4, 3, 8)).unbind(3)
    for found, expected in zip(grouped.split(plain.qkv(x)), (q, k, v), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("groups", [2, 1])
def test_the_heads_of_a_group_share_its_key_and_value(groups):
    layer, x = layer_of(groups), tokens()
    size = 4 // groups
    rows = layer.qkv(x).unflatten(-1, (groups, size + 2, 8))
    assert layer.qkv.weight.shape[0] == groups * (size + 2) * 8
    heads = []
    for head in range(4):
        group, place = divmod(head, size)
        q, k, v = rows[:, :, group, place], rows[:, :, group, -2], rows[:, :, group, -1]
        scores = (q @ k.mT / math.sqrt(8)).masked_fill(torch.ones(6, 6).triu(1).bool(), -math.inf)
        heads.append(scores.softmax(-1) @ v)
    torch.testing.assert_close(layer(x), layer.out(torch.cat(heads, -1)))


def test_a_shard_of_the_groups_gives_its_part_of_the_sum():
    whole, x = layer_of(2), tokens()
    total = whole.out.bias.detach().clone()
    for shard in range(2):
        part = layer_of(2)
        part.qkv.weight.data = whole.qkv.weight.data.chunk(2)[shard]
        part.qkv.bias.data = whole.qkv.bias.data.chunk(2)[shard]
        part.out.weight.data = whole.out.weight.data.chunk(2, 1)[shard]
        part.out.bias.data = torch.zeros(32, dtype=torch.float64)
        total = total + part(x)
    torch.testing.assert_close(total, whole(x))


@pytest.mark.parametrize("groups", [0, 2])
def test_tokens_first_in_memory_change_nothing(groups):
    layer, x = layer_of(groups), tokens()
    rotary = rotary_of(torch.arange(6), 8)
    token_first = x.transpose(0, 1).contiguous().transpose(0, 1)
    layer.qkv.register_forward_hook(lambda _, __, y: y.transpose(0, 1).contiguous().transpose(0, 1))
    shapes = []
    layer.attend = lambda q, k, v, causal: (shapes.append(q.shape), attend(q, k, v, causal))[1]
    torch.testing.assert_close(
        layer(token_first, rotary=rotary), layer_of(groups)(x, rotary=rotary)
    )
    assert shapes == [(1, 8, 6, 8)]


def test_pairs_of_channels_are_turned_by_their_angles():
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    positions = torch.tensor([0, 3, 1, 7, 100])
    found = rotate(x, rotary_of(positions, 8))
    for token, position in enumerate(positions.tolist()):
        for pair in range(4):
            angle = position * 10000 ** (-2 * pair / 8)
            a, b = x[:, :, token, pair], x[:, :, token, pair + 4]
            turned = complex(math.cos(angle), math.sin(angle)) * torch.complex(a, b)
            close = {"rtol": 1e-5, "atol": 1e-5}  # fp32 angles of up to 100.
            torch.testing.assert_close(found[:, :, token, pair], turned.real, **close)
            torch.testing.assert_close(found[:, :, token, pair + 4], turned.imag, **close)
    assert rotate(x.bfloat16(), rotary_of(positions, 8)).dtype == torch.bfloat16


def test_scores_depend_on_the_distance_alone():
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64).unbind(0)

    def score(at, of):
        turned = (rotate(x, rotary_of(torch.tensor([p]), 8)) for x, p in ((q, at), (k, of)))
        return torch.mul(*turned).sum()

    torch.testing.assert_close(score(5, 2), score(105, 102), rtol=1e-4, atol=1e-5)
    assert (score(5, 2) - score(5, 3)).abs() > 1e-3


@pytest.mark.parametrize("groups", [0, 2])
def test_a_layer_turns_queries_and_keys_alike(groups):
    layer, x = layer_of(groups), tokens()
    here, there = (layer(x, rotary=rotary_of(torch.arange(6) + by, 8)) for by in (0, 50))
    torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-5)
    assert (here - layer(x)).abs().max() > 1e-3


def test_far_positions_are_not_rounded_to_bf16():
    cos, sin = rotary_of(torch.tensor([1000, 1001]), 8, base=500.0)
    assert cos.dtype == sin.dtype == torch.float32
    torch.testing.assert_close(cos[:, 0], torch.tensor([1000.0, 1001.0]).cos(), rtol=0, atol=1e-4)


def test_an_odd_head_dim_has_no_pairs():
    with pytest.raises(ValueError, match="pairs of channels, but head_dim is 7"):
        rotary_of(torch.arange(3), 7)
