"""Rows held out for validation: a pure function of the seed and [job] data_order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush

import numpy as np
import torch
from jaxtyping import Int64
from numpy.typing import NDArray
from torch import Tensor

from titan_dit.config.section import UserError
from titan_dit.data.base import Source
from titan_dit.data.order import MIN_SIZE, Permutation, mix, round_keys
from titan_dit.rng import words

STREAM = "validation"


def held_out_rows(source: Source, seed: int, count: int, data_order: str) -> tuple[int, ...]:
    """Choose `count` rows, stratified over the groups of the source; ascending.

    Groups give equally many, or by their size, see `Source.held_out_by_size`. A group smaller than
    its share is held out whole, unless the source keeps its groups; the other groups fill the gap.
    Raises UserError if no row remains for training.
    """
    if not count:
        return ()
    if count >= len(source):
        raise UserError(
            f"[validation] samples={count} holds out all {len(source)} rows of [data], so none "
            f"remain for training. Set fewer, such as samples = {max(1, len(source) // 10)}."
        )
    check_kept(source, count)
    chosen = by_sorting if data_order == "sort" else by_key
    if (copies := source.copies) == 1:
        return tuple(sorted(chosen(source, seed, count).tolist()))
    if count % copies:
        raise UserError(
            f"[validation] samples={count}: a picture of [data] has {copies} rows (it and its "
            "mirror image), which are held out together. Set samples = "
            f"{count + copies - count % copies}."
        )
    pictures = sorted(chosen(FirstRows(source), seed, count // copies).tolist())
    return tuple(copies * i + copy for i in pictures for copy in range(copies))


def check_kept(source: Source, count: int) -> None:
    """Raise UserError if a group that must stay in training would be held out whole."""
    if source.keeps_groups:
        sizes = group_sizes(FirstRows(source))
        most = source.copies * int((sizes - 1).sum())
        if count > most:
            raise UserError(
                f"[validation] samples={count}: one picture of each of the {len(sizes)} buckets of "
                f"[data] stays in training, so at most {most} rows can be held out. Set fewer."
            )


def shares_of(source: Source, sizes: Int64[Tensor, " g"], count: int) -> Int64[Tensor, " g"]:
    """Pictures of each group to hold out, given how many it has."""
    able = (sizes - 1).clamp(min=0) if source.keeps_groups else sizes
    return proportional(sizes, able, count) if source.held_out_by_size else shares(able, count)


class FirstRows(Source):
    """The first row of each picture of a source."""

    def __init__(self, source: Source) -> None:
        self.source, self.keeps_groups = source, source.keeps_groups
        self.held_out_by_size = source.held_out_by_size

    def __len__(self) -> int:
        """Number of pictures."""
        return len(self.source) // self.source.copies

    def groups(self) -> Int64[Tensor, " n"] | None:
        """The class of every picture."""
        groups = self.source.groups()
        return None if groups is None else groups[:: self.source.copies]

    def group_parts(self) -> Iterator[Int64[Tensor, " n"]]:
        """The class of every picture, in parts. All rows of a picture are in one part."""
        return (part[:: self.source.copies] for part in self.source.group_parts())


def by_key(source: Source, seed: int, count: int) -> NDArray[np.int64]:
    """`count` rows with the smallest random keys, stratified. Memory grows with `count` only."""
    sizes = group_sizes(source)
    if not len(sizes):
        if len(source) < MIN_SIZE:
            return by_sorting(source, seed, count).numpy()
        return Permutation.of(seed, STREAM, 0, len(source))(np.arange(count))
    (key,) = round_keys(seed, STREAM, 0, rounds=1)
    wanted = shares_of(source, torch.from_numpy(sizes), count).numpy()
    spare = 8
    while True:
        # The fraction of a group's rows that almost surely holds its share: keys are uniform.
        margin = spare * (np.sqrt(wanted) + 2 * (wanted > 0))
        enough = np.minimum((wanted + margin) / np.maximum(sizes, 1), 1)
        rows, keys, groups = rows_below(source, key, (enough * 2**63).astype(np.uint64))
        by_group = np.lexsort((rows, keys, groups))
        rows, groups = rows[by_group], groups[by_group]
        places = np.arange(len(rows)) - np.searchsorted(groups, groups)
        taken = rows[places < wanted[groups]]
        if len(taken) == count:
            return taken
        spare *= 2


def group_sizes(source: Source) -> NDArray[np.int64]:
    """The number of rows of each group; empty without groups."""
    return counted(source.group_parts())


def counted(parts: Iterable[Int64[Tensor, " n"]]) -> NDArray[np.int64]:
    """How often each number occurs."""
    sizes = np.zeros(0, np.int64)
    for part in parts:
        more = np.bincount(part.numpy(), minlength=len(sizes))
        more[: len(sizes)] += sizes
        sizes = more
    return sizes


def rows_below(
    source: Source, key: np.uint64, limits: NDArray[np.uint64]
) -> tuple[NDArray[np.int64], NDArray[np.uint64], NDArray[np.int64]]:
    """Rows whose 63-bit key is below the limit of their group: (rows, keys, groups)."""
    found, first = [], 0
    for part in source.group_parts():
        groups = part.numpy()
        keys = mix(key, np.arange(first, first + len(groups), dtype=np.uint64)) >> np.uint64(1)
        inside = np.flatnonzero(keys < limits[groups])
        found.append((inside + first, keys[inside], groups[inside]))
        first += len(groups)
    rows, kept, of = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return rows, kept, of


def by_sorting(source: Source, seed: int, count: int) -> Int64[Tensor, " count"]:
    """Older runs' choice: the first rows of each group in a sorted permutation."""
    order = shuffled(seed, len(source))
    groups = source.groups()
    if groups is None:
        return order[:count]
    of_order = groups[order]
    # Rank of every row within its group, in shuffled order.
    by_group = torch.argsort(of_order, stable=True)
    sizes = torch.bincount(of_order)
    firsts = sizes.cumsum(0) - sizes
    places = torch.empty_like(by_group)
    places[by_group] = torch.arange(len(order)) - firsts[of_order[by_group]]
    taken = places < shares_of(source, sizes, count)[of_order]
    return order[taken]


def shuffled(seed: int, size: int) -> Int64[Tensor, " size"]:
    """Return a permutation of range(size), independent of every epoch's `rng.permutation`."""
    drawn = words(seed, STREAM, torch.zeros(1, dtype=torch.int64), 2 * size).view(size, 2)
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


def proportional(
    sizes: Int64[Tensor, " g"], able: Int64[Tensor, " g"], count: int
) -> Int64[Tensor, " g"]:
    """Split `count` rows over the groups by their sizes, at most `able` of each.

    By Adams' method, which rounds up: each row goes to the group with the most rows for each one
    that it has given. So all give one before any gives two, the largest first.
    """
    most, taken = able.tolist(), [0] * len(able)
    waiting = [(-math.inf, -size, group) for group, size in enumerate(sizes.tolist())]
    heapify(waiting)
    for _ in range(count):
        while True:
            _, size, group = heappop(waiting)
            if taken[group] < most[group]:
                break
        taken[group] += 1
        heappush(waiting, (size / taken[group], size, group))
    return torch.tensor(taken)
