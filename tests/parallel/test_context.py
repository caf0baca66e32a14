"""Context parallelism in one process: see `simulated_peers`."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from simulated_peers import SimulatedPeers, from_ranks, rounding, to_ranks
from torch.utils.checkpoint import checkpoint

from titan_dit.config.section import UserError
from titan_dit.kernels import attention, attention_kernels
from titan_dit.kernels.attention import attend_by
from titan_dit.kernels.attention_kernels import CPU, MATH, AttentionKernel
from titan_dit.models.layers import Attention, attend
from titan_dit.parallel import context
from titan_dit.parallel import ring_attention as ring
from titan_dit.parallel.context import ulysses_attention
from titan_dit.parallel.ring_attention import EAGER, Exchange, ring_attention

SIZES = [1, 2, 3, 4]
METHODS = {"ring": ring_attention, "ulysses": ulysses_attention}


def inputs(dtype, n=24, heads=12, d=8, sharpness=1.0, device="cpu"):
    """d_out, q, k, v as the model makes them; sharp logits make the softmax statistics matter."""
    generator = torch.Generator().manual_seed(0)
    draw = torch.randn(4, 2, n, heads, d, generator=generator, dtype=torch.float64)
    draw[1] *= sharpness
    # Most queries attend to one slice of the keys.
    draw[2, :, : n // 4] += 0.5 * sharpness**0.5
    return [x.transpose(1, 2).to(device, dtype) for x in draw]


def full(d_out, q, k, v, **mask):
    """Output and gradients of attention over all tokens at once."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = attend(q, k, v, **mask) if mask else F.scaled_dot_product_attention(q, k, v)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), d_out)


def in_slices(method, size, d_out, q, k, v, **options):
    """The same, with tokens sliced over `size` ranks."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    peers = SimulatedPeers(size)
    out = from_ranks(method(*(to_ranks(x, size) for x in (q, k, v)), peers, **options), size)
    found = out.detach(), *torch.autograd.grad(out, (q, k, v), d_out)
    assert not peers.under_way
    return found, peers


def errors(found, expected):
    """max|difference| of out, dq, dk, dv against max(max|g|, 1e-3 of the norm of all)."""
    norm = torch.stack([x.double().norm() for x in expected]).norm().item()
    return [
        (x.double() - y.double()).abs().max().item() / max(y.abs().max().item(), 1e-3 * norm)
        for x, y in zip(found, expected, strict=True)
    ]


TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("sharpness", [1.0, 10.0])
@pytest.mark.parametrize("kernel", [CPU, MATH], ids=["cpu", "math"])
def test_the_ring_gives_the_output_and_gradients_of_full_attention(size, dtype, sharpness, kernel):
    arguments = inputs(dtype, sharpness=sharpness)
    # Against fp64, since sharp softmaxes make the fp32 reference itself inexact.
    expected = full(*(x.double() for x in arguments))
    found, _ = in_slices(ring_attention, size, *arguments, kernel=kernel)
    alone = max(errors(full(*arguments), expected))
    bounds = TOLERANCE[dtype], 2 * alone, rounding(*arguments[1:3])
    assert max(errors(found, expected)) <= max(bounds)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_ulysses_gives_the_bits_of_full_attention(size, dtype):
    arguments = inputs(dtype, sharpness=10.0)
    found, _ = in_slices(ulysses_attention, size, *arguments)
    for x, y in zip(found, full(*arguments), strict=True):
        assert torch.equal(x, y)


MASKS = {"causal": {"causal": True}, "lengths": {"lengths": torch.tensor([24, 5])}}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("key", ["auto", "math"])
def test_ulysses_gives_masked_attention_to_the_bit_where_the_kernel_does(size, dtype, mask, key):
    arguments = inputs(dtype, sharpness=3.0)
    told = MASKS[mask]
    # Every simulated rank has the whole batch, and so the lengths of all its samples.
    each = {k: v.repeat(size) if k == "lengths" else v for k, v in told.items()}
    by_key = attend_by(key)
    found, _ = in_slices(ulysses_attention, size, *arguments, attend=by_key, **each)
    expected, _ = in_slices(ulysses_attention, 1, *arguments, attend=by_key, **told)
    # Matmuls of fewer heads have another order of summation.
    if key == "auto":
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    assert max(errors(found, expected)) < {torch.float64: 1e-13, torch.bfloat16: 0.02}[dtype]
    exact = full(*(x.double() for x in arguments), **told)
    assert max(errors(found, exact)) < {torch.float64: 1e-12, torch.bfloat16: 0.05}[dtype]


@pytest.mark.parametrize("mask", MASKS)
def test_the_layer_tells_ulysses_its_mask(mask):
    torch.manual_seed(0)
    layer = Attention(32, 4, mask=mask).double()
    x, lengths = torch.randn(2, 12, 32, dtype=torch.float64), torch.tensor([12, 5])
    given = {"lengths": lengths} if mask == "lengths" else {}
    expected = layer(x, **given)
    layer.attend = partial(ulysses_attention, peers=SimulatedPeers(4))
    each = {name: value.repeat(4) for name, value in given.items()}
    found = torch.cat(layer(torch.cat(x.chunk(4, 1)), **each).chunk(4), 1)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_the_error_of_bf16_does_not_grow_with_the_ranks():
    arguments = inputs(torch.bfloat16, n=64, sharpness=3.0)
    expected = full(*(x.double() for x in arguments))
    alone = max(errors(full(*arguments), expected))
    for size in (2, 4, 8, 16):
        found, _ = in_slices(ring_attention, size, *arguments)
        assert [x.dtype for x in found] == [torch.bfloat16] * 4
        # The output is rounded twice: by the kernel, for its block, and after the last merge.
        assert max(errors(found, expected)) <= 2.5 * alone


@pytest.mark.parametrize("first", [True, False])
def test_logits_that_overflow_exp_are_merged(first):
    # exp(400) is infinite in fp32 and exp(-400) is 0: only differences may be exponentiated.
    d_out, q, k, v = inputs(torch.float32, n=8, heads=1)
    k = k.clone()
    k[:, :, :4] *= 200
    assert (q @ k.mT).abs().max() > 1000
    arguments = [d_out, q, k, v] if first else [x.flip(2) for x in (d_out, q, k, v)]
    expected = full(*(x.double() for x in arguments))
    alone = errors(full(*arguments), expected)
    found, _ = in_slices(ring_attention, 4, *arguments)
    assert all(x.isfinite().all() for x in found)
    for error, error_alone in zip(errors(found, expected), alone, strict=True):
        assert error <= max(1e-6, 2 * error_alone)


def test_odd_sizes_and_one_token_per_rank_work():
    for n, heads, d in ((3, 1, 5), (15, 5, 12)):
        arguments = inputs(torch.float64, n=n, heads=heads, d=d)
        found, _ = in_slices(ring_attention, 3, *arguments)
        assert max(errors(found, full(*arguments))) < 1e-12


@pytest.mark.parametrize("size", [2, 3, 4])
def test_each_rank_sends_what_the_docstrings_say(size):
    arguments = inputs(torch.float32)
    all_tokens = arguments[0].numel()
    for method, shares in (("ring", 6 * (size - 1) / size), ("ulysses", 8 * (size - 1) / size**2)):
        _, peers = in_slices(METHODS[method], size, *arguments)
        assert peers.sent / size == pytest.approx(shares * all_tokens), method


def test_only_the_last_block_is_not_sent_on():
    _, q, k, v = inputs(torch.float32)
    peers = SimulatedPeers(4)
    with torch.no_grad():
        ring_attention(*(to_ranks(x, 4) for x in (q, k, v)), peers)
    assert peers.sent == 3 * (k.numel() + v.numel())
    assert not peers.under_way


def test_messages_travel_while_the_kernels_work():
    _, q, k, v = inputs(torch.float32)
    peers, under_way = SimulatedPeers(4), []

    def watched(function):
        def call(*arguments):
            under_way.append(len(peers.under_way))
            return function(*arguments)

        return call

    kernel = AttentionKernel(watched(CPU.forward), watched(CPU.backward))
    q = to_ranks(q, 4).requires_grad_()
    ring_attention(q, to_ranks(k, 4), to_ranks(v, 4), peers, kernel).sum().backward()
    # Four rotations forward and four backward; the gradients follow one rotation behind.
    assert under_way == [1, 1, 1, 0, 1, 1, 2, 1]


@pytest.mark.parametrize("method", METHODS)
def test_recomputation_gives_the_same_gradients(method):
    arguments = inputs(torch.float32)

    def recomputed(q, k, v, peers):
        return checkpoint(METHODS[method], q, k, v, peers, use_reentrant=False)

    plain, _ = in_slices(METHODS[method], 4, *arguments)
    again, _ = in_slices(recomputed, 4, *arguments)
    for x, y in zip(again, plain, strict=True):
        assert torch.equal(x, y)


def test_heads_that_do_not_divide_are_refused_with_the_numbers():
    q = torch.zeros(4, 6, 2, 8)
    with pytest.raises(
        UserError, match=r"cp=4 does not divide the 6 heads of a rank. Set cp_method = \"ring\""
    ):
        ulysses_attention(q, q, q, SimulatedPeers(4))


# Bugs that leave a healthy-looking output or loss. Each must be seen by the comparison above.


def stale_keys_in_backward(monkeypatch):
    """Backward uses this rank's own keys and values in every rotation."""
    original = ring.travel_backward

    def backward(d_out, q, k, v, out, lse, peers, kernel, *_):
        def block(d_out, q, _arrived_k, _arrived_v, out, lse, scale, causal):
            return kernel.backward(d_out, q, k, v, out, lse, scale, causal)

        return original(d_out, q, k, v, out, lse, peers, AttentionKernel(kernel.forward, block))

    monkeypatch.setattr(ring, "travel_backward", backward)


def local_statistics(monkeypatch):
    """Backward normalises each block by its own softmax."""
    original = ring.travel_backward

    def backward(d_out, q, k, v, out, lse, peers, kernel, *_):
        def block(d_out, q, k, v, out, lse, scale, causal):
            own_out, own_lse = kernel.forward(q, k, v, scale, causal)
            return kernel.backward(d_out, q, k, v, own_out, own_lse, scale, causal)

        return original(d_out, q, k, v, out, lse, peers, AttentionKernel(kernel.forward, block))

    monkeypatch.setattr(ring, "travel_backward", backward)


def gradients_that_stay_away(monkeypatch):
    """Every rank keeps the gradients that it computed for other ranks' keys."""

    def backward(d_out, q, k, v, out, lse, peers, kernel, *_):
        scale = q.shape[-1] ** -0.5
        moving, total, dkv = torch.stack((k, v)), 0, 0
        for _ in range(peers.size):
            dq, *blocks = kernel.backward(d_out, q, *moving, out, lse, scale, False)
            total, dkv = total + dq, dkv + torch.stack(blocks)
            moving = peers.arrive(peers.send(moving))
        return total, dkv

    monkeypatch.setattr(ring, "travel_backward", backward)


def average_of_blocks(monkeypatch):
    """Blocks are merged with equal weight."""

    def merge(out, lse, new_out, new_lse):
        return (out + new_out) / 2, lse

    monkeypatch.setattr(ring, "joining", lambda compiled: replace(EAGER, merge=merge))


@pytest.mark.parametrize(
    "bug",
    [stale_keys_in_backward, local_statistics, gradients_that_stay_away, average_of_blocks],
)
def test_the_comparison_catches_planted_bugs(bug, monkeypatch):
    arguments = inputs(torch.float32)
    expected = full(*arguments)
    assert max(errors(in_slices(ring_attention, 3, *arguments)[0], expected)) < 1e-6
    bug(monkeypatch)
    found, _ = in_slices(ring_attention, 3, *arguments)
    if bug is not average_of_blocks:
        assert errors(found, expected)[0] < 1e-6, "the output hides it"
    assert max(errors(found, expected)[1:]) > 1e-3


# The hook in the model, and what is sliced.


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("qk_norm", [False, True])
def test_the_layer_gives_the_same_with_its_tokens_in_slices(method, qk_norm):
    torch.manual_seed(0)
    layer = Attention(32, 4, qk_norm).double()
    x = torch.randn(2, 12, 32, dtype=torch.float64)
    expected = layer(x)
    layer.attend = lambda q, k, v: METHODS[method](q, k, v, SimulatedPeers(4))
    found = torch.cat(layer(torch.cat(x.chunk(4, 1))).chunk(4), 1)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("d", [64, 72, 12])
def test_four_ranks_on_one_gpu_give_what_attention_over_all_tokens_gives(method, dtype, d):
    arguments = inputs(dtype, n=256, heads=8, d=d, sharpness=5.0, device="cuda")
    expected = full(*(x.double() for x in arguments))
    alone = max(errors(full(*arguments), expected))
    found, _ = in_slices(METHODS[method], 4, *arguments)
    assert [x.dtype for x in found] == [dtype] * 4
    assert max(errors(found, expected)) <= max(3 * alone, TOLERANCE.get(dtype, 4e-3))


@pytest.mark.parametrize("method", METHODS)
def test_the_key_of_the_config_reaches_the_kernels(method, monkeypatch):
    ran = []

    def products(q, k, v, scale, causal):
        ran.append(q.shape)
        return MATH.forward(q, k, v, scale, causal)

    model = Attention(32, 4, False)
    attention.apply(model, attention.attend_by("math"))
    alone = Exchange("", 0, 1)  # A ring of one rank sends nothing.
    monkeypatch.setattr(Exchange, "over", lambda group: alone)
    monkeypatch.setattr(Exchange, "all_to_all", lambda self, parts: parts)
    context.apply(model, SimpleNamespace(get_group=lambda: None), method, "math")
    counting = AttentionKernel(products, MATH.backward)
    monkeypatch.setattr(attention_kernels, "MATH", counting)
    monkeypatch.setattr(attention, "MATH", counting)
    x = torch.randn(2, 6, 32)
    model(x).sum().backward()
    assert ran == [(2, 4, 6, 8)]
