"""Ulysses attention: all-to-all from token shards to head shards and back (arXiv:2309.14509)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from titan_dit.config.section import UserError
from titan_dit.models import layers
from titan_dit.parallel.exchange import Peers


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    peers: Peers,
    attend: Callable[..., Tensor] = layers.attend,
    causal: bool = False,
    lengths: Tensor | None = None,
) -> Tensor:
    """Attention of this rank's queries over the keys of all ranks; q is [b, heads, n/c, d].

    Tokens are in contiguous slices, with any mask. k and v may have fewer heads (groups). If c does
    not divide their number, they are repeated as often as needed, at most to one per head.

    `attend`: computes attention over all tokens for heads/c heads, with the mask.

    One all-to-all precedes `attend`, one follows. The result is bitwise that of one rank. Each rank
    sends 4 (c-1)/c^2 b n d (heads + groups) elements in forward and backward together.
    """
    c, heads = peers.size, q.shape[1]
    if heads % c:
        raise UserError(
            f'[parallel] cp_method="ulysses": cp={c} does not divide the {heads} heads of a rank. '
            f'Set cp_method = "ring" or a cp that divides {heads}.'
        )
    repeats = c // math.gcd(c, k.shape[1])
    k, v = (layers.for_heads(x, repeats * x.shape[1]) for x in (k, v))
    # Heads by the rank that gets them: [c, b, (heads + 2 groups)/c, n/c, d].
    parts = torch.cat([torch.unflatten(x, 1, (c, -1)).movedim(1, 0) for x in (q, k, v)], dim=2)
    whole = peers.all_to_all(parts)  # [c, ...] now by the rank that had these tokens
    # The heads of q, k and v that this rank has: each [b, ..., n, d].
    sizes = [x.shape[1] // c for x in (q, k, v)]
    q, k, v = torch.split(whole.permute(1, 2, 0, 3, 4).flatten(2, 3), sizes, dim=1)
    masked = {"causal": True} if causal else {} if lengths is None else {"lengths": lengths}
    out = attend(q, k, v, **masked)
    parts = peers.all_to_all(
        torch.unflatten(out, 2, (c, -1)).movedim(2, 0)
    )  # [c, b, heads/c, n/c, d]
    # Laid out as [b, n/c, heads, d], which is how the output projection reads it.
    return parts.permute(1, 3, 0, 2, 4).flatten(2, 3).transpose(1, 2)
