"""Attention over few tokens, for bf16 on a CPU, where torch's flash kernel is slow.

Up to MAX_TOKENS tokens flash reaches a quarter of a matmul's speed there. This uses plain matmuls
and a softmax, which torch.compile fuses into few kernels. Backward recomputes the forward, so no
more is saved than by flash. `benchmarks/step.py --bf16` measures it.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from titan_dit.config.layout import ActivationCheckpointConfig, CompileConfig, PrecisionConfig
from titan_dit.kernels.recomputed import recomputed
from titan_dit.models import layers

MAX_TOKENS = 512
"""Maximum tokens. From 1024 on flash is twice as fast: the scores no longer fit into the caches."""


def suits(
    device_type: str,
    precision: PrecisionConfig,
    recompute: ActivationCheckpointConfig,
    compilation: CompileConfig,
) -> bool:
    """True if "auto" takes this kernel: compiled (eager it is no faster) and without remat."""
    return (
        (device_type, precision.dtype, precision.attention) == ("cpu", "bf16", "auto")
        and compilation.enabled
        and recompute.mode == "none"
    )


def attend(
    q: Float[Tensor, "b heads n d"],
    k: Float[Tensor, "b groups n d"],
    v: Float[Tensor, "b groups n d"],
    causal: bool = False,
    lengths: Int[Tensor, " b"] | None = None,
) -> Float[Tensor, "b heads n d"]:
    """Softmax attention; falls back to `layers.attend` with lengths or above MAX_TOKENS."""
    if lengths is not None or q.shape[2] > MAX_TOKENS:
        return layers.attend(q, k, v, causal, lengths)
    k, v = layers.for_heads(k, q.shape[1]), layers.for_heads(v, q.shape[1])
    out: Tensor = recomputed(products, q, k, v, causal)
    return out


def products(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Attention, q, k and v [b, heads, n, d], with scores as precise as flash's fp32 ones.

    A bf16 matmul rounds its output, and rounding a score of 8 changes its weight by 3%. A second
    matmul computes the rounding error, q k^T - rounded(q k^T), in fp32, and rounds only that.
    """
    q3, k3, v3 = (x.flatten(0, 1) for x in (q, k, v))
    rounded = torch.bmm(q3, k3.transpose(1, 2))
    # Detached: the first matmul has the gradient of the sum.
    lost = torch.baddbmm(rounded, q3, k3.transpose(1, 2), beta=-1).detach()
    scores = (rounded.float() + lost.float()) / math.sqrt(q.shape[-1])
    if causal:
        place = torch.arange(q.shape[2], device=q.device)
        scores = scores.masked_fill(place > place[:, None], float("-inf"))
    weights = scores.softmax(-1)
    return torch.bmm(weights.to(v.dtype), v3).view(q.shape)
