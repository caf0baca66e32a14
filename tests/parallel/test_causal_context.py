"""Causal attention and grouped queries over context-parallel ranks in one process."""

import math

import pytest
import torch
from simulated_peers import SimulatedPeers, from_ranks, on_threads, rounding, to_ranks

from titan_dit.kernels.attention_kernels import CPU, MATH, AttentionKernel
from titan_dit.models.layers import attend
from titan_dit.parallel.context import (
    chunks_of,
    join_tokens,
    slice_tokens,
    slicing_of,
    ulysses_attention,
)
from titan_dit.parallel.ring_attention import ALL, Block, block_of, ring_attention

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}


def inputs(dtype=torch.float64, n=24, heads=6, groups=6, d=8, device="cpu"):
    """d_out, q, k, v with strides as in a layer; sharp logits make the statistics matter."""
    generator = torch.Generator().manual_seed(0)
    draw = [
        torch.randn(2, n, count, d, generator=generator, dtype=torch.float64)
        for count in (heads, heads, groups, groups)
    ]
    draw[1] *= 3
    return [x.transpose(1, 2).to(device, dtype) for x in draw]


def whole(d_out, q, k, v, causal=True, dtype=torch.float64):
    """Output and gradients in one process."""
    d_out, q, k, v = (x.detach().to(dtype).requires_grad_() for x in (d_out, q, k, v))
    out = attend(q, k, v, causal=causal)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), d_out)


def in_a_ring(size, tensors, kernel=CPU, causal=True, slicing="zigzag"):
    """The same, by a ring of threads with a slice of the tokens each."""

    def work(peers):
        names = dict(enumerate(tensors))
        mine = slice_tokens(names, dict.fromkeys(names, 2), peers.rank, size, slicing)
        d_out, q, k, v = (x.requires_grad_() for x in mine.values())
        out = ring_attention(q, k, v, peers, kernel, causal=causal)
        return out.detach(), *torch.autograd.grad(out, (q, k, v), d_out)

    return [join_tokens(x, slicing, 2) for x in zip(*on_threads(size, work), strict=True)]


def error(found, expected):
    """The largest difference over the largest value, of output and gradients."""
    return max(
        ((x.double() - y).abs().max() / y.abs().max()).item()
        for x, y in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("groups", [6, 2, 1])
@pytest.mark.parametrize("kernel", [CPU, MATH], ids=["cpu", "math"])
def test_a_causal_ring_is_causal_attention_in_one_process(size, dtype, groups, kernel):
    tensors = inputs(dtype, groups=groups)
    found = in_a_ring(size, tensors, kernel)
    assert [x.dtype for x in found] == [dtype] * 4
    expected = whole(*tensors)
    # Sharp logits: in fp32 one process is inexact as well.
    alone = error(whole(*tensors, dtype=dtype), expected)
    bounds = TOLERANCE[dtype], 4 * alone, rounding(*tensors[1:3])
    assert error(found, expected) < max(bounds)


@pytest.mark.parametrize(("n", "size", "d"), [(8, 4, 5), (6, 3, 12), (42, 3, 8), (10, 1, 8)])
def test_odd_sizes_and_one_token_per_chunk_work(n, size, d):
    tensors = inputs(n=n, heads=3, groups=3, d=d)
    assert error(in_a_ring(size, tensors), whole(*tensors)) < 1e-12


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("groups", [2, 1])
def test_a_ring_without_a_mask_sends_groups_not_heads(size, groups):
    tensors, peers = inputs(groups=groups), SimulatedPeers(size)
    d_out, q, k, v = tensors
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = from_ranks(ring_attention(*(to_ranks(x, size) for x in (q, k, v)), peers), size)
    found = out.detach(), *torch.autograd.grad(out, (q, k, v), d_out)
    assert error(found, whole(*tensors, causal=False)) < 1e-12
    # Keys and values forward, again backward, and their gradients.
    assert peers.sent == 6 * (size - 1) * k.numel()


def test_bf16_is_as_exact_in_a_ring_as_alone():
    tensors = inputs(torch.bfloat16, n=64, groups=2)
    expected = whole(*tensors)
    alone = error(whole(*tensors, dtype=torch.bfloat16), expected)
    for size in (2, 4):
        assert error(in_a_ring(size, tensors), expected) <= 2.5 * alone


def flops(q, k, causal):
    """Products of queries and keys that are not masked, in multiples of 2 d."""
    n, m = q.shape[2], k.shape[2]
    assert not causal or n == m, "kernels align such a mask differently"
    return q.shape[:2].numel() * (n * (n + 1) // 2 if causal else n * m)


def work_of_ranks(size, n):
    """FLOPs of every rank, forward and backward, as a share of all."""
    _, q, k, v = inputs(n=n)

    def work(peers):
        count = [0, 0]

        def forward(q, k, v, scale, causal):
            count[0] += flops(q, k, causal)
            return CPU.forward(q, k, v, scale, causal)

        def backward(d_out, q, k, v, out, lse, scale, causal):
            count[1] += flops(q, k, causal)
            return CPU.backward(d_out, q, k, v, out, lse, scale, causal)

        mine = slice_tokens({"q": q, "k": k, "v": v}, dict.fromkeys("qkv", 2), peers.rank, size)
        leaves = [x.requires_grad_() for x in mine.values()]
        out = ring_attention(*leaves, peers, AttentionKernel(forward, backward), causal=True)
        out.sum().backward()
        return count

    done = on_threads(size, work)
    assert sum(x[0] for x in done) == q.shape[:2].numel() * n * (n + 1) // 2, "done twice, or not"
    return done


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_all_ranks_of_a_causal_ring_have_equal_work(size):
    for passes in zip(*work_of_ranks(size, 16 * size), strict=True):
        assert max(passes) <= 1.01 * min(passes)


def test_contiguous_slices_in_a_causal_ring_are_seen():
    tensors = inputs()
    assert error(in_a_ring(4, tensors), whole(*tensors)) < 1e-12
    assert error(in_a_ring(4, tensors, slicing="contiguous"), whole(*tensors)) > 0.1


def keys_of_the_wrong_half(is_earlier, half):
    return (ALL, slice(half, None)) if is_earlier else (slice(half, None), ALL)


def queries_of_the_wrong_half(is_earlier, half):
    return (ALL, slice(half)) if is_earlier else (slice(half), ALL)


def masked_once_more(is_earlier, half):
    return ALL, ALL, True


def unmasked(is_earlier, half):
    return ALL, ALL


BUGS = [keys_of_the_wrong_half, queries_of_the_wrong_half, masked_once_more, unmasked]


@pytest.mark.parametrize("bug", BUGS)
def test_a_misaligned_block_is_seen(bug, monkeypatch):
    tensors = inputs()
    right = block_of

    def wrong(rank, source, tokens, causal):
        if source == rank:
            return right(rank, source, tokens, causal)
        return Block(*bug(source < rank, tokens // 2))

    monkeypatch.setattr("titan_dit.parallel.ring_attention.block_of", wrong)
    assert error(in_a_ring(3, tensors), whole(*tensors)) > 1e-3


def test_the_slicing_is_a_function_of_mask_and_method():
    assert slicing_of("causal", "ring") == "zigzag"
    for mask, method in (("none", "ring"), ("causal", "ulysses"), ("lengths", "ulysses")):
        assert slicing_of(mask, method) == "contiguous"
    assert [chunks_of(rank, 3, "zigzag") for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert [chunks_of(rank, 3, "contiguous") for rank in range(3)] == [(0,), (1,), (2,)]


@pytest.mark.parametrize("slicing", ["contiguous", "zigzag"])
def test_slices_join_to_the_tokens_in_order(slicing):
    tokens = torch.arange(24).view(2, 12)
    slices = [slice_tokens({"x": tokens}, {"x": 1}, rank, 3, slicing)["x"] for rank in range(3)]
    assert torch.equal(join_tokens(slices, slicing), tokens)
    assert all(x.is_contiguous() and x.untyped_storage().nbytes() == 64 for x in slices)


@pytest.mark.parametrize("size", [2, 3, 4, 6])
@pytest.mark.parametrize("groups", [12, 4, 3, 1])
@pytest.mark.parametrize("causal", [False, True])
def test_ulysses_repeats_groups_only_as_often_as_it_must(size, groups, causal):
    tensors = inputs(heads=12, groups=groups)
    d_out, q, k, v = tensors
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    peers, seen = SimulatedPeers(size), []

    def watched(q, k, v, **mask):
        seen.append((q.shape[1], k.shape[1]))
        return attend(q, k, v, **mask)

    slices = (to_ranks(x, size) for x in (q, k, v))
    out = from_ranks(ulysses_attention(*slices, peers, watched, causal=causal), size)
    found = out.detach(), *torch.autograd.grad(out, (q, k, v), d_out)
    assert error(found, whole(*tensors, causal=causal)) < 1e-12
    [(heads, received)] = seen
    assert heads == 12 // size
    # As few as can be sent in equal numbers to all ranks.
    assert received * size == math.lcm(groups, size)
    if groups % size == 0:
        sent = 4 * (size - 1) / size**2 * (12 + groups) * q.numel() / 12
        assert peers.sent / size == pytest.approx(sent)
