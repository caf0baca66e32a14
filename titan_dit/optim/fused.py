"""Functions of a matrix's rows as one kernel of a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

MOST_GRAPHS = 128
"""Widths that one function may have; by default torch stops at eight graphs."""


@functools.cache
def compiled(function: Callable[..., None]) -> Callable[..., None]:
    """`function(rows, ...)` compiled for any number of rows; `rows`: tensors [n, ...].

    Each width has a graph of its own: a kernel that knows it reads a row once, and takes an
    element's row and column from its number without a 64-bit division.
    """
    from torch._dynamo import config as dynamo

    dynamo.recompile_limit = max(dynamo.recompile_limit, MOST_GRAPHS)
    graph: Callable[..., None] = torch.compile(function, fullgraph=True, dynamic=False)

    def run(rows: Sequence[Tensor], *others: Any, **settings: Any) -> None:
        for tensor in rows:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        graph(rows, *others, **settings)

    return run
