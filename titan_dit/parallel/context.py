"""Context parallelism: every sample's tokens in c slices, one per cp rank.

Only attention needs the tokens of other ranks; all other layers work token by token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from titan_dit.config.section import UserError
from titan_dit.models.base import Mask
from titan_dit.models.layers import Attention

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
    `compiled`: [compile] enabled, for ring.
    """
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    if not layers:
        raise UserError(
            f"[parallel] cp={mesh.size()}: [model] has no titan_dit.models.layers.Attention, so "
            "tokens could not attend to those of other ranks. Use that layer, or set cp = 1."
        )
    # Lazy imports: most runs have no cp, but all read `slicing_of`.
    from titan_dit.parallel.exchange import Exchange
    from titan_dit.parallel.ring_attention import ring_attention
    from titan_dit.parallel.ulysses_attention import ulysses_attention

    peers = Exchange.over(mesh.get_group())
    for layer in layers:
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
    """The inverse of `slice_tokens`: the slices of all ranks to tokens in the sample's order."""
    parts: dict[int, Tensor] = {}
    for rank, mine in enumerate(slices):
        chunks = chunks_of(rank, len(slices), slicing)
        parts |= dict(zip(chunks, mine.chunk(len(chunks), dim), strict=True))
    return torch.cat([parts[chunk] for chunk in sorted(parts)], dim)
