"""How a parameter of ours lies in the files of transformers: names, and order in memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from titan_dit.interop.original_dit import swap_leading


@dataclass(frozen=True)
class Same:
    """One tensor, equal to ours."""

    names: tuple[str, ...]

    def to_ours(self, *theirs: Tensor) -> Tensor:
        """The parameter."""
        return theirs[0]

    def to_theirs(self, ours: Tensor) -> tuple[Tensor, ...]:
        """The inverse."""
        return (ours,)


@dataclass(frozen=True)
class Transposed(Same):
    """A Conv1D of GPT-2: its weight is [in, out]."""

    def to_ours(self, *theirs: Tensor) -> Tensor:
        """The parameter, [out, in]."""
        return theirs[0].t()

    def to_theirs(self, ours: Tensor) -> tuple[Tensor, ...]:
        """The inverse."""
        return (ours.t(),)


@dataclass(frozen=True)
class FusedQKV(Same):
    """A Conv1D or a bias of outputs [3, heads, head_dim]; ours are [heads, 3, head_dim]."""

    heads: int

    def to_ours(self, *theirs: Tensor) -> Tensor:
        """The parameter, [out, in] or [out]."""
        rows = theirs[0].t()  # Of a bias the same.
        return swap_leading(rows.contiguous(), 3, self.heads)

    def to_theirs(self, ours: Tensor) -> tuple[Tensor, ...]:
        """The inverse."""
        return (swap_leading(ours, self.heads, 3).t(),)


@dataclass(frozen=True)
class SplitQKV(Same):
    """Three linear layers, query, key and value; ours is one of outputs [heads, 3, head_dim]."""

    heads: int

    def to_ours(self, *theirs: Tensor) -> Tensor:
        """The parameter, [out, in] or [out]."""
        return swap_leading(torch.cat(theirs), 3, self.heads)

    def to_theirs(self, ours: Tensor) -> tuple[Tensor, ...]:
        """The inverse."""
        return swap_leading(ours, self.heads, 3).chunk(3)


@dataclass(frozen=True)
class Padded(Same):
    """A table with a row per token id; ours has `padding` more, which no token uses."""

    padding: int

    def to_ours(self, *theirs: Tensor) -> Tensor:
        """The parameter; its last rows are 0."""
        rows = theirs[0]
        return torch.cat((rows, rows.new_zeros(self.padding, *rows.shape[1:])))

    def to_theirs(self, ours: Tensor) -> tuple[Tensor, ...]:
        """The inverse."""
        return (ours[: len(ours) - self.padding],)
