"""The ring over cuDNN's operators: a stand-in with their signature and semantics, and a GPU."""

import pytest
import torch
from simulated_peers import SimulatedPeers, from_ranks, to_ranks

from titan_dit.kernels import attention
from titan_dit.kernels.attention_choice import AttentionShape
from titan_dit.kernels.attention_kernels import CUDNN, MATH
from titan_dit.models.layers import attend
from titan_dit.parallel.ring_attention import ring_attention

HALF = (torch.bfloat16, torch.float16)


def accepted(*tensors):
    """What cuDNN takes: half precision, up to 128 channels in a row, a multiple of 8."""
    for x in tensors:
        assert x.dtype in HALF
        assert x.shape[-1] % 8 == 0
        assert x.shape[-1] <= 128
        assert x.stride(-1) == 1


def forward(q, k, v, bias, with_lse, dropout=0.0, causal=False, debug=False, *, scale=None):
    accepted(q, k, v)
    assert bias is None
    assert with_lse
    assert not any((dropout, debug))
    assert not causal or q.shape == k.shape
    out, lse = MATH.forward(q, k, v, scale, causal)
    seed = torch.empty((), dtype=torch.int64)
    # MHA.cpp lays out the output as q, and the log-sum-exp as [b, heads, n, 1].
    out = torch.empty_like(q).copy_(out)
    return (
        out,
        lse[..., None],
        q.new_empty(0),
        q.new_empty(0),
        q.shape[2],
        k.shape[2],
        seed,
        seed,
        seed,
    )


def backward(
    d_out, q, k, v, out, lse, seed, offset, bias, cum_q, cum_k, max_q, max_k, dropout, causal,
    *, scale=None,
):  # fmt: skip
    accepted(d_out, q, k, v, out)
    assert bias is cum_q is cum_k is None
    assert not dropout
    assert (max_q, max_k) == (q.shape[2], k.shape[2])
    # The graph reads the statistics with their strides, in fp32.
    assert lse.dtype == torch.float32
    assert lse.shape == (*q.shape[:3], 1)
    assert lse.is_contiguous()
    return MATH.backward(d_out, q, k, v, out, lse[..., 0], scale, causal)


@pytest.fixture
def cudnn_on_a_cpu():
    library = torch.library.Library("aten", "IMPL", "CPU")
    library.impl("_scaled_dot_product_cudnn_attention", forward)
    library.impl("_scaled_dot_product_cudnn_attention_backward", backward)
    yield
    library._destroy()


def inputs(dtype, d, n=48, device="cpu", sharpness=5.0):
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(4, 2, n, 3, d, generator=generator)
    drawn[1] *= sharpness
    return [x.transpose(1, 2).to(device, dtype) for x in drawn]


def one_process(d_out, q, k, v):
    """Output and gradients of attention over all tokens, in fp64."""
    d_out, q, k, v = (x.double() for x in (d_out, q, k, v))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = attend(q, k, v)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), d_out)


def in_a_ring(size, kernel, d_out, q, k, v, compiled=False):
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    slices = (to_ranks(x, size) for x in (q, k, v))
    out = from_ranks(ring_attention(*slices, SimulatedPeers(size), kernel, compiled), size)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), d_out)


def errors(found, expected):
    return [
        ((x.double() - y).abs().max() / y.abs().max()).item()
        for x, y in zip(found, expected, strict=True)
    ]


TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("d", [12, 72])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_ring_of_cudnn_is_attention_in_one_process(cudnn_on_a_cpu, dtype, d, size):
    arguments = inputs(dtype, d)
    found = in_a_ring(size, CUDNN, *arguments)
    assert [x.dtype for x in found] == [dtype] * 4
    assert max(errors(found, one_process(*arguments))) < TOLERANCE[dtype]


def test_the_gradients_need_the_statistics_of_all_ranks(cudnn_on_a_cpu, monkeypatch):
    arguments = inputs(torch.bfloat16, 8)
    expected = one_process(*arguments)

    def own_statistics(d_out, q, k, v, out, lse, scale, causal):
        out, lse = MATH.forward(q, k, v, scale, causal)
        return CUDNN.backward(d_out, q, k, v, out, lse, scale, causal)

    planted = type(CUDNN)(CUDNN.forward, own_statistics)
    assert max(errors(in_a_ring(4, planted, *arguments), expected)[1:]) > 0.1


GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("d", [12, 64, 72, 128])
# Per rank: a tile, no multiple of one, and the length that overflows before cuDNN 9.26.
@pytest.mark.parametrize("tokens", [128, 100, 64])
@pytest.mark.parametrize("compiled", [False, True])
def test_on_a_gpu_a_ring_of_cudnn_is_attention_in_one_process(dtype, d, tokens, compiled):
    shape = AttentionShape(3, tokens, d, dtype, torch.device("cuda"), ring=True)
    if reason := attention.refusal("cudnn", shape):
        pytest.skip(reason)
    arguments = inputs(dtype, d, 4 * tokens, "cuda")
    expected = one_process(*arguments)
    found = errors(in_a_ring(4, "cudnn", *arguments, compiled=compiled), expected)
    flash = errors(in_a_ring(4, "flash", *arguments), expected)
    assert max(found) < max(2 * max(flash), TOLERANCE[dtype])


@pytest.mark.gpu
@GPU
def test_on_a_gpu_the_length_that_overflows_has_finite_gradients():
    """Every logit is about -120: lse < -88.7 overflows, see `overflows_at`."""
    from titan_dit.kernels.attention_choice import overflows_at

    assert overflows_at(704, False)
    q, k, v = (0.1 * torch.randn(1, 1, 704, 64, device="cuda").bfloat16() for _ in range(3))
    q[..., 0], k[..., 0] = 1.0, -120 * 8
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = attention.attend_by("auto", "cuda")(q, k, v)
    for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
        assert gradient.isfinite().all()
