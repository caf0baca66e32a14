"""Attention over one block of keys, with a mergeable result, for ring attention.

Forward returns the output and the softmax's log-sum-exp (lse). Backward takes the output and lse
of ALL blocks; dQ, dK and dV are then the block's exact share of the gradient (FlashAttention-2,
arXiv:2307.08691, sec. 3.1.2 and algorithm 2):

    P = exp(scale Q K^T - lse),  dV = P^T dO,  dS = P * (dO V^T - rowsum(dO * O)),
    dQ = scale dS K,  dK = scale dS^T Q

Only this file calls torch's private attention operators; their schemas are the same in torch 2.11
to 2.15. Shapes: [b, heads, n, d]; lse [b, heads, n]. `causal` needs as many keys as queries: for
other numbers the kernels align the mask differently, some at the first key and some at the last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_dit.kernels.attention_choice import AttentionShape, hardware_of, order
from titan_dit.models.base import Mask

ForwardKernel: TypeAlias = Callable[[Tensor, Tensor, Tensor, float, bool], tuple[Tensor, Tensor]]
"""(q, k, v, scale, causal) -> out in the dtype of q, lse in fp32 (fp64 for fp64)."""
BackwardKernel: TypeAlias = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float, bool], tuple[Tensor, Tensor, Tensor]
]
"""(d_out, q, k, v, out, lse, scale, causal) -> dq, dk, dv in the dtype of q."""


@dataclass(frozen=True)
class AttentionKernel:
    """A forward and its backward."""

    forward: ForwardKernel
    backward: BackwardKernel


def named(name: str, q: Tensor, causal: bool = False) -> AttentionKernel:
    """The kernel for a value of [precision] attention; RuntimeError if the device has none.

    "auto" assumes as many keys as queries, as in a ring.
    """
    if name == "auto":
        _, heads, tokens, head_dim = q.shape
        mask: Mask = "causal" if causal else "none"
        shape = AttentionShape(heads, tokens, head_dim, q.dtype, q.device, True, mask)
        deterministic = torch.are_deterministic_algorithms_enabled()
        name = order(shape, hardware_of(q.device), deterministic)[0]
    if name == "math":
        return MATH
    if q.device.type == "cpu":
        if name == "flash":
            return CPU
        raise RuntimeError("a CPU has flash and math only")
    return {"cudnn": CUDNN, "efficient": EFFICIENT}.get(name, FLASH)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which blocks are accumulated."""
    return torch.promote_types(dtype, torch.float32)


def _scores(q: Tensor, k: Tensor, scale: float, causal: bool) -> Tensor:
    scores = scale * (q @ k.transpose(-1, -2))
    if not causal:
        return scores
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    return scores.masked_fill(~seen, float("-inf"))


def _math_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    exact = accumulator(q.dtype)
    q, k, v, dtype = q.to(exact), k.to(exact), v.to(exact), q.dtype
    scores = _scores(q, k, scale, causal)
    lse = scores.logsumexp(-1)
    return ((scores - lse[..., None]).exp() @ v).to(dtype), lse


def masked_products(q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor) -> Tensor:
    """Attention by plain matmuls, masked by `seen`, [b, 1, 1, n] or [n, n]; differentiable."""
    exact = accumulator(q.dtype)
    scores = scale * (q.to(exact) @ k.to(exact).transpose(-1, -2))
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return (weights @ v.to(exact)).to(q.dtype)


def _math_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    exact, dtype = accumulator(q.dtype), q.dtype
    d_out, q, k, v, out = (x.to(exact) for x in (d_out, q, k, v, out))
    p = (_scores(q, k, scale, causal) - lse[..., None]).exp()
    ds = p * (d_out @ v.transpose(-1, -2) - (d_out * out).sum(-1, keepdim=True))
    dq, dk, dv = scale * (ds @ k), scale * (ds.transpose(-1, -2) @ q), p.transpose(-1, -2) @ d_out
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


def _cpu_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    # Takes fp64, fp32, bf16 and fp16, any d. Returns (out, lse), lse laid out as [b, n, heads].
    q, k, v = _rows(q, k, v)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, scale=scale
    )
    return out, lse


def _cpu_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    # Returns (dq, dk, dv).
    d_out, q, k, v, out = _rows(d_out, q, k, v, out)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        d_out, q, k, v, out, lse, 0.0, causal, scale=scale
    )
    return dq, dk, dv


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    # Takes bf16 and fp16, d a multiple of 8 up to 256. Returns (out, lse, cum_seq_q, cum_seq_k,
    # max_q, max_k, rng_state, unused, debug_mask); lse is fp32, natural, of the scaled scores.
    d = q.shape[-1]
    q, k, v = _padded(q, k, v)
    result = torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal, False, scale=scale
    )
    return result[0][..., :d], result[1]


def _flash_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    # cum_seq_q and cum_seq_k are for ragged batches: without them the batch is dense. The random
    # state is read with dropout only. Reads lse as [b, heads, n], whatever its strides.
    d, n, m = q.shape[-1], q.shape[2], k.shape[2]
    d_out, q, k, v, out = _padded(d_out, q, k, v, out)
    state = torch.empty(2, dtype=torch.uint64, device=q.device)
    unused = torch.empty((), dtype=torch.uint64, device=q.device)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        d_out, q, k, v, out, lse.contiguous(), None, None, n, m, 0.0, causal, state, unused,
        scale=scale,
    )  # fmt: skip
    return dq[..., :d], dk[..., :d], dv[..., :d]


LSE_ALIGNMENT = 32
"""The efficient kernels pad rows of the log-sum-exp to a multiple of this."""


def _efficient_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    # Takes fp32, bf16 and fp16. Returns (out, lse, philox_seed, philox_offset); lse is fp32, its
    # rows padded to LSE_ALIGNMENT with infinity.
    d, n = q.shape[-1], q.shape[2]
    q, k, v = _padded(q, k, v)
    result = torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, None, True, 0.0, causal, scale=scale
    )
    return result[0][..., :d], result[1][..., :n]


def _efficient_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    # Returns (dq, dk, dv, dbias). Reads `out` as if it were laid out as [b, n, heads, d].
    d = q.shape[-1]
    d_out, q, k, v, out = _padded(d_out, q, k, v, out)
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    lse = F.pad(lse, (0, -lse.shape[-1] % LSE_ALIGNMENT), value=float("inf")).contiguous()
    seed = torch.empty((), dtype=torch.int64, device=q.device)  # read with dropout only
    dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        d_out, q, k, v, None, out, lse, seed, seed, 0.0, [True, True, True, False], causal,
        scale=scale,
    )  # fmt: skip
    return dq[..., :d], dk[..., :d], dv[..., :d]


def _cudnn_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    # Takes bf16 and fp16, and reads anything else as fp16. Returns (out, lse, cum_seq_q, cum_seq_k,
    # max_q, max_k, philox_seed, philox_offset, debug_mask); lse is fp32, [b, heads, n, 1].
    if q.dtype not in (torch.bfloat16, torch.float16):
        raise RuntimeError(f"cuDNN attention takes bf16 and fp16, not {q.dtype}")
    d = q.shape[-1]
    q, k, v = _padded(q, k, v)
    result = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )
    return result[0][..., :d], result[1].flatten(2)


def _cudnn_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    # Returns (dq, dk, dv). Without bias and cum_seq the batch is dense; the seeds are read with
    # dropout only. Expects lse contiguous, [b, heads, n, 1].
    d, n, m = q.shape[-1], q.shape[2], k.shape[2]
    d_out, q, k, v, out = _padded(d_out, q, k, v, out)
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        d_out, q, k, v, out, lse.contiguous()[..., None], seed, seed, None, None, None, n, m, 0.0,
        causal, scale=scale,
    )  # fmt: skip
    return dq[..., :d], dk[..., :d], dv[..., :d]


def _rows(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Make the channel dim contiguous; the kernels accept any strides in the other dims."""
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in tensors)


def _padded(*tensors: Tensor) -> tuple[Tensor, ...]:
    """`_rows`, zero-padded to a multiple of 8 channels; zeros change no product."""
    missing = -tensors[0].shape[-1] % 8
    return tuple(F.pad(x, (0, missing)) for x in tensors) if missing else _rows(*tensors)


MATH = AttentionKernel(_math_forward, _math_backward)
"""Plain matmuls with the n x n scores in memory: for fp64 on a GPU, and as a reference."""
CPU = AttentionKernel(_cpu_forward, _cpu_backward)
FLASH = AttentionKernel(_flash_forward, _flash_backward)
EFFICIENT = AttentionKernel(_efficient_forward, _efficient_backward)
CUDNN = AttentionKernel(_cudnn_forward, _cudnn_backward)
