"""Rows held out for validation: a pure function of the seed."""

from __future__ import annotations

import torch
from jaxtyping import Int64
from torch import Tensor

from titan_dit.config.section import UserError
from titan_dit.data.base import Source
from titan_dit.rng import words


def held_out_rows(source: Source, seed: int, count: int) -> tuple[int, ...]:
    """Choose `count` rows, stratified over the groups of the source; ascending.

    A group smaller than its share is held out whole; the other groups fill the gap. Raises
    UserError if no row remains for training.
    """
    if not count:
        return ()
    if count >= len(source):
        raise UserError(
            f"[validation] samples={count} holds out all {len(source)} rows of [data], so none "
            f"remain for training. Set fewer, such as samples = {max(1, len(source) // 10)}."
        )
    order = shuffled(seed, len(source))
    groups = source.groups()
    if groups is None:
        return tuple(sorted(order[:count].tolist()))
    of_order = groups[order]
    # Rank of every row within its group, in shuffled order.
    by_group = torch.argsort(of_order, stable=True)
    sizes = torch.bincount(of_order)
    firsts = sizes.cumsum(0) - sizes
    places = torch.empty_like(by_group)
    places[by_group] = torch.arange(len(order)) - firsts[of_order[by_group]]
    taken = places < shares(sizes, count)[of_order]
    return tuple(sorted(order[taken].tolist()))


def shuffled(seed: int, size: int) -> Int64[Tensor, " size"]:
    """Return a permutation of range(size), independent of every epoch's `rng.permutation`."""
    drawn = words(seed, "validation", torch.zeros(1, dtype=torch.int64), 2 * size).view(size, 2)
    return torch.argsort((drawn[:, 0] >> 1) << 31 | drawn[:, 1] >> 1, stable=True)


def shares(sizes: Int64[Tensor, " g"], count: int) -> Int64[Tensor, " g"]:
    """Split `count` rows over the groups as evenly as their sizes allow."""
    taken = torch.zeros_like(sizes)
    while (left := count - int(taken.sum())) > 0:
        able = (sizes > taken).nonzero().flatten()
        each = left // len(able)
        if each == 0:
            taken[able[:left]] += 1
        else:
            taken[able] = torch.minimum(sizes[able], taken[able] + each)
    return taken
