"""Rotary position embeddings (arXiv:2104.09864), with the channel pairs of GPT-NeoX and Llama.

Channel i of the first half of a head and channel i of the second half are one pair: the vector of
both is rotated by position x base**(-2 i / head_dim).
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

Rotary: TypeAlias = tuple[Tensor, Tensor]
"""Cosines and sines of the angles, each fp32 [n, head_dim / 2]."""


def rotary_of(positions: Int[Tensor, " n"], head_dim: int, base: float = 10000.0) -> Rotary:
    """Cosines and sines for tokens at `positions`; in fp32, since bf16 counts only to 256.

    Raises ValueError if `head_dim` is odd.
    """
    if head_dim % 2:
        raise ValueError(f"Rotary positions need pairs of channels, but head_dim is {head_dim}.")
    channels = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device)
    angles = positions.float()[:, None] / base ** (channels / head_dim)
    return angles.cos(), angles.sin()


def rotate(x: Float[Tensor, "b heads n d"], rotary: Rotary) -> Float[Tensor, "b heads n d"]:
    """Rotate queries or keys, in fp32 or fp64 and rounded once; in memory [b, n, heads, d]."""
    exact = torch.promote_types(x.dtype, torch.float32)
    cos, sin = (part.to(exact)[:, None] for part in rotary)
    first, second = x.transpose(1, 2).to(exact).chunk(2, -1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    return turned.to(x.dtype).transpose(1, 2)
