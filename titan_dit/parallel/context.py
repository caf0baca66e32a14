"""Context parallelism: every sample's tokens in c slices, one per cp rank.

Only attention needs the tokens of other ranks; all other layers work token by token.
`slice_tokens` makes the slices. `apply` gives the attention layers ring attention
(ring_attention.py) or Ulysses attention (here, arXiv:2309.14509).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from titan_dit.config.section import UserError
from titan_dit.models import layers
from titan_dit.models.base import Mask
from titan_dit.models.layers import Attention

if TYPE_CHECKING:  # Most runs have no cp.
    from titan_dit.parallel.ring_attention import Peers

Method = Literal["ring", "ulysses"]
Slicing: TypeAlias = Literal["contiguous", "zigzag"]
"""Contiguous: rank r of c holds chunk r of c. Zigzag: chunks r and 2c-1-r of 2c, in this order."""


def slicing_of(mask: Mask, method: Method) -> Slicing:
    """The slicing of tokens: zigzag where contiguous slices would have unequal work."""
    return "zigzag" if (mask, method) == ("causal", "ring") else "contiguous"


def chunks_of(rank: int, size: int, slicing: Slicing) -> tuple[int, ...]:
    """The chunks of a rank's slice; a sample has one chunk per rank, or two in zigzag."""
    return (rank, 2 * size - 1 - rank) if slicing == "zigzag" else (rank,)


def apply(
    model: nn.Module,
    mesh: DeviceMesh,
    method: Method,
    attention: str = "auto",
    compiled: bool = False,
) -> None:
    """Make every attention layer of the model attend over all ranks of the 1D `mesh`.

    `attention`: the value of [precision] attention, for ring; Ulysses keeps the layer's kernel.
    `compiled`: [compile] enabled, for ring. Raises UserError for a model without such a layer.
    """
    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    if not attentions:
        raise UserError(
            f"[parallel] cp={mesh.size()}: [model] has no titan_dit.models.layers.Attention, so "
            "tokens could not attend to those of other ranks. Use that layer, or set cp = 1."
        )
    # Lazy import: most runs have no cp, but all import this file.
    from titan_dit.parallel.ring_attention import Exchange, ring_attention

    peers = Exchange.over(mesh.get_group())
    for layer in attentions:
        if method == "ring":
            ring = partial(ring_attention, peers=peers, kernel=attention, compiled=compiled)
            layer.attend = ring
        else:
            layer.attend = partial(ulysses_attention, peers=peers, attend=layer.attend)


def slice_tokens(
    tensors: Mapping[str, Tensor],
    token_dims: Mapping[str, int],
    rank: int,
    size: int,
    slicing: Slicing = "contiguous",
) -> dict[str, Tensor]:
    """Slice each tensor along its token dim for one rank of `size`.

    Tensors without an entry in `token_dims` (timesteps, labels) stay whole. Slices are copies, so
    that the whole tensors can be freed.
    """
    chunks, sliced = chunks_of(rank, size, slicing), dict(tensors)
    for name, dim in token_dims.items():
        tokens, count = tensors[name].shape[dim], len(chunks) * size
        assert tokens % count == 0, (name, tokens, size, slicing)
        parts = tensors[name].chunk(count, dim)
        sliced[name] = torch.cat([parts[chunk] for chunk in chunks], dim)
    return sliced


def join_tokens(slices: Sequence[Tensor], slicing: Slicing, dim: int = 1) -> Tensor:
    """The inverse of `slice_tokens`: join all ranks' slices along `dim`, in the sample's order."""
    parts: dict[int, Tensor] = {}
    for rank, mine in enumerate(slices):
        chunks = chunks_of(rank, len(slices), slicing)
        parts |= dict(zip(chunks, mine.chunk(len(chunks), dim), strict=True))
    return torch.cat([parts[chunk] for chunk in sorted(parts)], dim)


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
    sends 4 (c-1)/c^2 b n d (heads + groups) elements in forward and backward together. Raises
    UserError if c does not divide the heads.
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
