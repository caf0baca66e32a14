"""The blocks of a ring: which queries meet which keys, and how the blocks' results are joined.

Outputs are joined by their log-sum-exp, gradients by sums.
Compiled, each join is one or two kernels instead of the 8 (outputs) and 3 (gradients) that eager
PyTorch launches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from titan_dit.kernels.attention_kernels import Kernel, accumulator
from titan_dit.models.layers import for_heads

ALL = slice(None)


@dataclass(frozen=True)
class Block:
    """Part of a rank's queries and part of another rank's keys, multiplied at one hop of a ring."""

    queries: slice
    keys: slice
    causal: bool = False

    @property
    def at_queries(self) -> tuple[slice, ...]:
        """Index of the queries in [b, heads, n, ...]."""
        return ALL, ALL, self.queries

    @property
    def at_keys(self) -> tuple[slice, ...]:
        """Index of the keys in stacked keys and values, [2, b, groups, n, d]."""
        return ALL, ALL, ALL, self.keys

    def forward(self, kernel: Kernel, q: Tensor, kv: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of the queries over the keys."""
        k, v = (for_heads(x, q.shape[1]) for x in take(kv, self.at_keys))
        return kernel.forward(take(q, self.at_queries), k, v, scale, self.causal)

    def backward(
        self,
        kernel: Kernel,
        d_out: Tensor,
        q: Tensor,
        kv: Tensor,
        out: Tensor,
        lse: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of the queries, the keys and the values."""
        groups = kv.shape[2]
        k, v = (for_heads(x, q.shape[1]) for x in take(kv, self.at_keys))
        d_out, q, out, lse = (take(x, self.at_queries) for x in (d_out, q, out, lse))
        dq, dk, dv = kernel.backward(d_out, q, k, v, out, lse, scale, self.causal)
        return dq, of_groups(dk, groups), of_groups(dv, groups)


def block_of(rank: int, source: int, tokens: int, causal: bool) -> Block:
    """The block that `rank` computes with the keys of `source`; slices have `tokens` tokens.

    With a causal mask, rank r of c holds chunks r and 2c-1-r of 2c (`context.chunks_of`). Both its
    chunks come after the first chunk of an earlier rank, and before the second one. Its second
    chunk comes after both chunks of a later rank, its first one before both. Each of these blocks
    is half of the product of two slices, as is a rank's own: all ranks have equal work.
    """
    if not causal:
        return Block(ALL, ALL)
    if source == rank:
        return Block(ALL, ALL, causal=True)
    half = tokens // 2
    return Block(ALL, slice(half)) if source < rank else Block(slice(half, None), ALL)


def take(whole: Tensor, at: tuple[slice, ...]) -> Tensor:
    """`whole[at]`; `whole` itself if the index covers all of it."""
    return whole if at[-1] == ALL else whole[at]


def put(whole: Tensor, at: tuple[slice, ...], values: Tensor) -> Tensor:
    """Set `whole[at]` in place and return `whole`; `values` if the index covers all of it."""
    if at[-1] == ALL:
        return values
    whole[at] = values
    return whole


def of_groups(x: Tensor, groups: int) -> Tensor:
    """Sum the gradients of keys or values over each group's heads, in fp32; see `for_heads`."""
    if x.shape[1] == groups:
        return x
    return torch.unflatten(x, 1, (groups, -1)).sum(2, dtype=accumulator(x.dtype))


def merge(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention over two sets of keys.

    Each output is weighted by its share of the softmax's sum, exp(lse - merged lse) <= 1: it cannot
    overflow. `out` is fp32, because bf16 rounding would accumulate over c blocks.
    """
    both = torch.logaddexp(lse, new_lse)
    out = out * (lse - both).exp()[..., None] + new_out * (new_lse - both).exp()[..., None]
    return out, both


def add(
    dq: Tensor, more: Tensor, dk: Tensor, dv: Tensor, arrived: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Add a block's gradients to dq, and to those of its keys and values, stacked.

    The sums are fp32, as `dq` and `arrived` are. `arrived`: the keys' and values' gradients so far;
    None for the first block that adds to these keys.
    """
    dkv = torch.stack((dk, dv))
    dkv = dkv.to(accumulator(dk.dtype)) if arrived is None else dkv + arrived
    return dq + more, dkv


@dataclass(frozen=True)
class Joining:
    """The two joins of a ring."""

    merge: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    add: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]


EAGER = Joining(merge, add)


def joining(compiled: bool) -> Joining:
    """The joins, compiled or eager."""
    return _compiled() if compiled else EAGER


@cache
def _compiled() -> Joining:
    # The ring is opaque to the compiler of its block (see ring_attention.py), so these are graphs
    # of their own. Not `fullgraph`: with more shapes than torch compiles, they run eagerly.
    return Joining(torch.compile(merge), torch.compile(add))
