"""Joins the results of a ring's ranks: outputs by their log-sum-exp, gradients by sums.

Compiled, each join is one or two kernels instead of the 8 (outputs) and 3 (gradients) that eager
PyTorch launches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from titan_dit.kernels.attention_kernels import accumulator


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

    `dq` and `arrived` are fp32, so the sums are; None: the first block that adds to these keys.
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
