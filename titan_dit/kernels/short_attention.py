"""Attention over few tokens, for bf16 on a CPU, where torch's flash kernel is slow.

Up to MAX_TOKENS tokens it reaches a quarter of the speed of a matrix product there. This is plain
products and a softmax instead, which torch.compile joins into few kernels, computed again in
backward: what it keeps is what flash keeps. `benchmarks/step.py --bf16` measures it.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from titan_dit.config.layout import CompileConfig, PrecisionConfig, RematConfig
from titan_dit.kernels.recomputed import recomputed
from titan_dit.models import layers

MAX_TOKENS = 512
"""From 1024 on flash is twice as fast: the scores no longer fit into the caches."""


def suits(
    device_type: str,
    precision: PrecisionConfig,
    recompute: RematConfig,
    compilation: CompileConfig,
) -> bool:
    """Whether "auto" takes it: uncompiled it is no faster, and remat has its own way with flash."""
    return (
        (device_type, precision.dtype, precision.attention) == ("cpu", "bf16", "auto")
        and compilation.enabled
        and recompute.mode == "none"
    )


def attend(
    q: Float[Tensor, "b heads n d"],
    k: Float[Tensor, "b heads n d"],
    v: Float[Tensor, "b heads n d"],
    causal: bool = False,
    lengths: Int[Tensor, " b"] | None = None,
) -> Float[Tensor, "b heads n d"]:
    """Softmax attention, scaled by 1 / sqrt(d); the n x n scores live while it is computed.

    With a mask (see `layers.attend`) torch's own.
    """
    if causal or lengths is not None or q.shape[2] > MAX_TOKENS:
        return layers.attend(q, k, v, causal, lengths)
    out: Tensor = recomputed(products, q, k, v)
    return out


def products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention with scores as exact as flash has them, whose sums stay in fp32.

    A product gives bf16, and rounding a score of 8 moves its weight by 3%. So a second one gives
    what the first has lost: q k^T - rounded(q k^T), summed in fp32 and then rounded in turn.
    """
    q3, k3, v3 = (x.flatten(0, 1) for x in (q, k, v))
    rounded = torch.bmm(q3, k3.transpose(1, 2))
    # No gradient: that of the sum is the first product's.
    lost = torch.baddbmm(rounded, q3, k3.transpose(1, 2), beta=-1).detach()
    weights = ((rounded.float() + lost.float()) / math.sqrt(q.shape[-1])).softmax(-1)
    return torch.bmm(weights.to(v.dtype), v3).view(q.shape)
