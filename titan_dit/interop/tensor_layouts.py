"""Layouts of our parameters in other projects' files: names, and order in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from titan_dit.interop.tensor_file import OnDemand


def swap_leading(rows: Float[Tensor, "r ..."], first: int, second: int) -> Float[Tensor, "r ..."]:
    """Permute rows [first, second, head_dim] to [second, first, head_dim]."""
    apart = rows.view(first, second, -1, *rows.shape[1:])
    return apart.transpose(0, 1).reshape(rows.shape)


@dataclass(frozen=True)
class Same:
    """One tensor, equal to ours."""

    names: tuple[str, ...]
    moves_inputs: ClassVar[bool] = False
    """True if a weight's columns are in another order: an adapter's A does not fit it."""

    def to_ours(self, *theirs: Tensor) -> Tensor:
        """Our parameter, of any shape, from the other format's tensors in the order of `names`."""
        return theirs[0]

    def to_theirs(self, ours: Tensor) -> tuple[Tensor, ...]:
        """The inverse of `to_ours`: the tensors in the order of `names`."""
        return (ours,)


@dataclass(frozen=True)
class Row(Same):
    """A matrix of one row; ours is a vector."""

    def to_ours(self, *theirs: Tensor) -> Tensor:
        """The parameter, [d]."""
        return theirs[0][0]

    def to_theirs(self, ours: Tensor) -> tuple[Tensor, ...]:
        """The matrix [1, d]."""
        return (ours[None],)


@dataclass(frozen=True)
class Transposed(Same):
    """A Conv1D of GPT-2: its weight is [in, out]."""

    moves_inputs = True

    def to_ours(self, *theirs: Tensor) -> Tensor:
        """The parameter, [out, in]."""
        return theirs[0].t()

    def to_theirs(self, ours: Tensor) -> tuple[Tensor, ...]:
        """The weight [in, out]."""
        return (ours.t(),)


@dataclass(frozen=True)
class FusedQKV(Same):
    """A Conv1D or a bias of outputs [3, heads, head_dim]; ours are [heads, 3, head_dim]."""

    heads: int

    def to_ours(self, *theirs: Tensor) -> Tensor:
        """The parameter, [out, in] or [out]."""
        rows = theirs[0].t()  # A bias stays the same.
        return swap_leading(rows.contiguous(), 3, self.heads)

    def to_theirs(self, ours: Tensor) -> tuple[Tensor, ...]:
        """The weight [in, out], or the bias [out]."""
        return (swap_leading(ours, self.heads, 3).t(),)


@dataclass(frozen=True)
class RowsOfQKV(Same):
    """A linear layer or a bias of outputs [3, heads, head_dim]; ours are [heads, 3, head_dim]."""

    heads: int

    def to_ours(self, *theirs: Tensor) -> Tensor:
        """The parameter, [out, in] or [out]."""
        return swap_leading(theirs[0], 3, self.heads)

    def to_theirs(self, ours: Tensor) -> tuple[Tensor, ...]:
        """The weight [out, in], or the bias [out], in the other order."""
        return (swap_leading(ours, self.heads, 3),)


@dataclass(frozen=True)
class SplitQKV(Same):
    """Linear layers of queries, keys and values; ours is one of outputs [heads, 3, head_dim].

    With two names: of keys and values alone.
    """

    heads: int

    def to_ours(self, *theirs: Tensor) -> Tensor:
        """The parameter, [out, in] or [out]."""
        return swap_leading(torch.cat(theirs), len(self.names), self.heads)

    def to_theirs(self, ours: Tensor) -> tuple[Tensor, ...]:
        """A weight [out / len(names), in], or a bias, for each of `names`."""
        return swap_leading(ours, self.heads, len(self.names)).chunk(len(self.names))


@dataclass(frozen=True)
class SplitGate(Same):
    """Two linear layers of SwiGLU, gate and value; ours is one of outputs [ffn, 2]."""

    def to_ours(self, *theirs: Tensor) -> Tensor:
        """The parameter, [out, in]."""
        return torch.stack(theirs, 1).flatten(0, 1)

    def to_theirs(self, ours: Tensor) -> tuple[Tensor, ...]:
        """Gate and value, each [ffn, in]."""
        return torch.unflatten(ours, 0, (-1, 2)).unbind(1)


@dataclass(frozen=True)
class FusedGate(Same):
    """A linear layer of SwiGLU of outputs [2, ffn], gate before value; ours are [ffn, 2]."""

    def to_ours(self, *theirs: Tensor) -> Tensor:
        """The parameter, [out, in]."""
        return SplitGate(self.names).to_ours(*theirs[0].chunk(2))

    def to_theirs(self, ours: Tensor) -> tuple[Tensor, ...]:
        """The weight [2 ffn, in], gate before value."""
        return (torch.cat(SplitGate(self.names).to_theirs(ours)),)


@dataclass(frozen=True)
class Part(Same):
    """A range of rows or columns of a tensor that holds several of ours, one after the other.

    The layouts of the others follow in order: `to_theirs` joins them.
    """

    inner: Same
    """The layout of ours in its range."""
    dim: int
    """0 for rows, 1 for columns."""
    first: int
    size: int
    is_last: bool

    def to_ours(self, *theirs: Tensor) -> Tensor:
        """Our parameter, from its range of the whole tensor."""
        return self.inner.to_ours(theirs[0].narrow(self.dim, self.first, self.size))

    def to_theirs(self, ours: Tensor) -> tuple[Tensor, ...]:
        """The range alone; the function `to_theirs` joins the ranges of a tensor."""
        return self.inner.to_theirs(ours)


@dataclass(frozen=True)
class ConvKernel(Same):
    """A convolution of patches [out, c, p, p]; ours is a linear layer of inputs (p, p, c)."""

    moves_inputs = True
    patch: int

    def to_ours(self, *theirs: Tensor) -> Tensor:
        """The parameter, [out, p p c]."""
        return theirs[0].permute(0, 2, 3, 1).flatten(1)

    def to_theirs(self, ours: Tensor) -> tuple[Tensor, ...]:
        """The kernel [out, c, p, p]."""
        return (ours.view(len(ours), self.patch, self.patch, -1).permute(0, 3, 1, 2),)


@dataclass(frozen=True)
class ClipKernel(ConvKernel):
    """A convolution of patches [out, c, 1, p, p] of single frames; ours as in `ConvKernel`."""

    def to_ours(self, *theirs: Tensor) -> Tensor:
        """The parameter, [out, p p c]."""
        return super().to_ours(theirs[0].squeeze(2))

    def to_theirs(self, ours: Tensor) -> tuple[Tensor, ...]:
        """The kernel [out, c, 1, p, p]."""
        (kernel,) = super().to_theirs(ours)
        return (kernel.unsqueeze(2),)


@dataclass(frozen=True)
class KernelPart(Part):
    """A range of the input channels of a convolution of patches."""

    moves_inputs = True


@dataclass(frozen=True)
class Table(Same):
    """A table [1, rows, d]; ours is a vector [rows * d]."""

    rows: int

    def to_ours(self, *theirs: Tensor) -> Tensor:
        """The parameter, [rows * d]."""
        return theirs[0].flatten()

    def to_theirs(self, ours: Tensor) -> tuple[Tensor, ...]:
        """The table [1, rows, d]."""
        return (ours.view(1, self.rows, -1),)


@dataclass(frozen=True)
class Copies(Same):
    """Equal tensors under several names."""

    def to_theirs(self, ours: Tensor) -> tuple[Tensor, ...]:
        """Our tensor under each of `names`."""
        return (ours,) * len(self.names)


@dataclass(frozen=True)
class FilledTable(Copies):
    """Copies of a label table, padded to `rows` rows with its last row, the null class."""

    classes: int
    rows: int

    def to_ours(self, *theirs: Tensor) -> Tensor:
        """The table [classes + 1, d]: the rows of the classes, and the null row."""
        return theirs[0][: self.classes + 1]

    def to_theirs(self, ours: Tensor) -> tuple[Tensor, ...]:
        """Copies of the table [rows, d]."""
        null = ours[-1:].expand(self.rows - self.classes, -1)
        return super().to_theirs(torch.cat((ours[:-1], null)))


@dataclass(frozen=True)
class Padded(Same):
    """A table with a row per token id. Ours has `padding` more rows, which no token uses."""

    padding: int

    def to_ours(self, *theirs: Tensor) -> Tensor:
        """The table [rows + padding, d]; its last rows are 0."""
        rows = theirs[0]
        return torch.cat((rows, rows.new_zeros(self.padding, *rows.shape[1:])))

    def to_theirs(self, ours: Tensor) -> tuple[Tensor, ...]:
        """The table [rows, d], without our last rows."""
        return (ours[: len(ours) - self.padding],)


def to_theirs(
    layouts: Mapping[str, Same], ours: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of the other format, from our parameters; each of ours is read once."""
    ranges = list[Tensor]()
    for name, layout in layouts.items():
        parts = layout.to_theirs(ours[name])
        if isinstance(layout, Part):
            ranges += parts
            if not layout.is_last:
                continue
            parts = (torch.cat(ranges, layout.dim),)
            ranges.clear()
        yield from zip(layout.names, parts, strict=True)


def to_ours(
    layouts: Mapping[str, Same], theirs: Mapping[str, Tensor], parameters: Mapping[str, Tensor]
) -> OnDemand:
    """Our parameters in fp32, converted lazily from the other format's tensors `theirs`.

    `parameters`: ours, on the meta device, for the shapes.
    """

    def get(name: str) -> Tensor:
        parts = (theirs[part].float() for part in needed(layouts[name]))
        return layouts[name].to_ours(*parts).contiguous()

    outline = {name: parameters[name].float() for name in layouts}
    return OnDemand(outline, get)


def needed(layout: Same) -> tuple[str, ...]:
    """Names of the tensors that ours is made from; of several copies, the first."""
    return layout.names[:1] if isinstance(layout, Copies) else layout.names
