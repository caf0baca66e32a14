import math

import pytest
import torch
import torch.nn.functional as F

from titan_dit.kernels import attention_kernels
from titan_dit.kernels.attention_choice import AttentionShape, hardware_of, order
from titan_dit.kernels.attention_kernels import CPU, CUDNN, EFFICIENT, FLASH, MATH, named

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def inputs(dtype, device="cpu", n=10, m=7, d=8, sharpness=1.0):
    """d_out, q [2, 3, n, d] and k, v [2, 3, m, d], transposed views as the model makes them."""
    generator = torch.Generator().manual_seed(0)
    drawn = [
        torch.randn(2, tokens, 3, d, generator=generator, dtype=torch.float64).transpose(1, 2)
        for tokens in (n, n, m, m)
    ]
    drawn[1] = drawn[1] * sharpness
    return [x.to(device, dtype) for x in drawn]


def reference(d_out, q, k, v, causal=False):
    """out, lse, dq, dk, dv by autograd, in fp64."""
    d_out, q, k, v = (x.double().detach().requires_grad_() for x in (d_out, q, k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        place = torch.arange(q.shape[2], device=q.device)
        scores = scores.masked_fill(place > place[:, None], -math.inf)
    out = scores.softmax(-1) @ v
    return out, scores.logsumexp(-1), *torch.autograd.grad(out, (q, k, v), d_out)


def run(kernel, d_out, q, k, v, causal=False):
    scale = 1 / math.sqrt(q.shape[-1])
    out, lse = kernel.forward(q, k, v, scale, causal)
    assert out.dtype == q.dtype
    assert lse.dtype == attention_kernels.accumulator(q.dtype)
    gradients = kernel.backward(d_out, q, k, v, out, lse, scale, causal)
    assert [g.dtype for g in gradients] == [q.dtype] * 3
    return out, lse, *gradients


def assert_close(found, expected, tolerance):
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), found, expected, strict=True):
        assert x.shape == y.shape, name
        error = (x.double() - y).abs().max() / y.abs().max()
        assert error <= tolerance, (name, error.item())


# Logits up to 60 are rounded to 4e-6 in fp32.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("d", [8, 12, 72])
@pytest.mark.parametrize("sharpness", [1.0, 20.0])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kernel", [CPU, MATH], ids=["cpu", "math"])
def test_a_kernel_gives_attention_its_log_sum_exp_and_its_gradients(
    kernel, causal, dtype, d, sharpness
):
    arguments = inputs(dtype, m=10 if causal else 7, d=d, sharpness=sharpness)
    expected = reference(*arguments, causal)
    assert_close(run(kernel, *arguments, causal), expected, TOLERANCE[dtype])


@pytest.mark.parametrize("kernel", [CPU, MATH], ids=["cpu", "math"])
def test_blocks_share_the_whole_gradient_when_given_the_whole_statistics(kernel):
    d_out, q, k, v = inputs(torch.float64, m=8, sharpness=5.0)
    out, lse, *gradients = reference(d_out, q, k, v)
    scale = 1 / math.sqrt(q.shape[-1])
    blocks = [
        kernel.backward(d_out, q, k[:, :, part], v[:, :, part], out, lse, scale, False)
        for part in (slice(0, 3), slice(3, 8))
    ]
    dqs, dks, dvs = zip(*blocks, strict=True)
    found = [sum(dqs), torch.cat(dks, 2), torch.cat(dvs, 2)]
    torch.testing.assert_close(found, gradients, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("kernel", [CPU, MATH], ids=["cpu", "math"])
def test_strides_change_nothing(kernel):
    d_out, q, k, v = inputs(torch.float32, m=10)
    expected = run(kernel, *(x.contiguous() for x in (d_out, q, k, v)))
    # Views of a fused projection, strided channels, an expanded gradient.
    fused = torch.stack((q, k, v), 3).transpose(1, 2).contiguous().transpose(1, 2).unbind(3)
    columns = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in (d_out, q, k, v)]
    for arguments in ((d_out, *fused), columns):
        torch.testing.assert_close(run(kernel, *arguments), expected, rtol=1e-6, atol=1e-6)
    ones = torch.ones(()).expand_as(d_out)
    torch.testing.assert_close(
        run(kernel, ones, q, k, v), run(kernel, ones.contiguous(), q, k, v), rtol=0, atol=0
    )


def test_the_cpu_takes_its_own_kernel_for_every_dtype():
    for dtype in TOLERANCE:
        assert named("auto", torch.empty(1, 1, 1, 8, dtype=dtype)) is CPU
    assert named("auto", torch.empty(1, 1, 1, 8, device="meta")) is MATH


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [(FLASH, torch.bfloat16), (EFFICIENT, torch.float32), (CUDNN, torch.bfloat16)],
)
@pytest.mark.parametrize("d", [12, 64])
@pytest.mark.parametrize("causal", [False, True])
def test_this_torch_takes_the_arguments_of_the_gpu_kernels(kernel, dtype, d, causal):
    # Without a GPU: on the meta device an operator checks arguments and returns shapes.
    d_out, q, k, v = inputs(dtype, "meta", n=33, m=33 if causal else 40, d=d)
    out, lse, *gradients = run(kernel, d_out, q, k, v, causal)
    assert out.shape == q.shape
    assert lse.shape == q.shape[:3]
    assert [g.shape for g in gradients] == [q.shape, k.shape, v.shape]


def test_the_key_of_the_config_names_a_kernel():
    here, there = torch.empty(1, 1, 1, 8), torch.empty(1, 1, 1, 8, device="meta")
    assert named("auto", here) is named("flash", here) is CPU
    assert named("math", here) is named("math", there) is MATH
    found = [named(key, there) for key in ("flash", "flash3", "flash4", "cudnn", "efficient")]
    assert found == [FLASH, FLASH, FLASH, CUDNN, EFFICIENT]
    for key in ("flash3", "cudnn", "efficient"):
        with pytest.raises(RuntimeError, match="a CPU has flash and math only"):
            named(key, here)
    # cuDNN would silently read fp32 as fp16.
    with pytest.raises(RuntimeError, match=r"takes bf16 and fp16, not torch\.float32"):
        CUDNN.forward(there, there, there, 1.0, False)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("CUDNN", torch.bfloat16),
        ("CUDNN", torch.float16),
        ("FLASH", torch.bfloat16),
        ("FLASH", torch.float16),
        ("EFFICIENT", torch.float32),
        ("EFFICIENT", torch.bfloat16),
        ("EFFICIENT", torch.float16),
        ("MATH", torch.float64),
        ("MATH", torch.float32),
    ],
)
@pytest.mark.parametrize(("n", "m", "d"), [(10, 7, 8), (64, 64, 64), (33, 100, 12), (50, 50, 72)])
@pytest.mark.parametrize("causal", [False, True])
def test_a_gpu_kernel_gives_attention_its_log_sum_exp_and_its_gradients(
    name, dtype, n, m, d, causal
):
    if causal and n != m:
        pytest.skip("causal is for as many keys as queries")
    kernel = getattr(attention_kernels, name)
    arguments = inputs(dtype, "cuda", n, m, d, sharpness=5.0)
    tolerance = {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 4e-3}.get(dtype, 2e-2)
    assert_close(run(kernel, *arguments, causal), reference(*arguments, causal), tolerance)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", [136, 192, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_on_a_gpu_cudnn_is_right_for_the_wide_heads_that_it_is_given(causal, d, dtype):
    device = torch.device("cuda")
    asked = AttentionShape(3, 100, d, dtype, device, ring=True)
    if "cudnn" not in order(asked, hardware_of(device)):
        pytest.skip("this device, or its cuDNN, has no such heads")
    arguments = inputs(dtype, "cuda", 100, 100, d, sharpness=5.0)
    tolerance = 4e-3 if dtype is torch.float16 else 2e-2
    assert_close(run(CUDNN, *arguments, causal), reference(*arguments, causal), tolerance)


@pytest.mark.gpu
@needs_gpu
def test_a_gpu_kernel_agrees_with_what_torch_chooses():
    d_out, q, k, v = inputs(torch.bfloat16, "cuda", 64, 64, 64)
    found, *_ = run(named("auto", q), d_out, q, k, v)
    torch.testing.assert_close(found, F.scaled_dot_product_attention(q, k, v))
