"""Weights in bf16 without an fp32 copy: what a step makes of them is rounded at random.

bf16 has 8 bits: rounded to the nearest number, a weight would not notice a step below 2**-9 of its
size. Here it becomes one of its two neighbours, the nearer one with the larger probability, so that
the mean is the weight itself (arXiv:2010.06192).

An element's random bits are a function of (seed, parameter, step, row-major index in the whole
tensor): every layout rounds alike, and a resumed run repeats them.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from titan_dit.models.weight_draws import mixed, signed
from titan_dit.optim.fused import compiled
from titan_dit.ranks.shards import own_indices
from titan_dit.rng import GOLDEN

PIECE = 2**24
"""Elements that are updated at a time, in fp32: 64 MiB of weights, and as much of gradients."""
ROUNDED_AT_ONCE = {"cpu": 2**15, "cuda": 2**22}
"""Elements whose random bits are in memory at a time, 8 bytes each: see `init.chunk_size`."""


class StochasticRounding:
    """Rounds the weights of an optimizer's parameters."""

    def __init__(self, seed: int, names: Mapping[Tensor, str]) -> None:
        self.seed, self.names = seed, names
        self.step = 0
        """Number of the step whose results are rounded."""
        self.indices: dict[Tensor, list[Tensor]] = {}
        """Parameter -> for each dim the indices of this rank's elements, times the stride."""

    def round(self, parameter: Tensor, shard: Tensor, values: Tensor, *, compiles: bool) -> None:
        """Write fp32 `values` to the bf16 `shard` of a parameter.

        `compiles`: in one kernel on a GPU.
        """
        if not shard.numel():
            return
        rows, inner = self.places(parameter)
        key = torch.full((), self.key(self.names[parameter]), dtype=torch.int64, device=rows.device)
        fuses = compiles and shard.is_cuda
        at_once = ROUNDED_AT_ONCE.get(shard.device.type, ROUNDED_AT_ONCE["cuda"])
        num_rows = sys.maxsize if fuses else max(1, at_once // inner.numel())
        rounds = compiled(round_in_place) if fuses else round_in_place
        parts = (
            torch.split(t.view(rows.numel(), -1), num_rows)
            for t in (shard, values, rows.view(-1, 1))
        )
        for part in zip(*parts, strict=True):
            rounds(part, inner, key)

    def places(self, parameter: Tensor) -> tuple[Tensor, Tensor]:
        """(rows, columns) whose sums are the indices of this rank's elements; cached, int64."""
        if parameter not in self.indices:
            whole = parameter if parameter.ndim else parameter.view(1)
            self.indices[parameter] = [own_indices(whole, dim) for dim in range(whole.ndim)]
        rows, *columns = self.indices[parameter]
        inner = sum(columns, start=torch.zeros_like(rows.flatten()[:1]))
        return rows.flatten(), inner.view(1, -1)

    def key(self, name: str) -> int:
        """The key of a parameter's random bits in this step, as int64."""
        text = f"{self.seed}/rounding/{self.step}/{name}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return signed(int.from_bytes(digest, "little"))


def round_in_place(rows: Sequence[Tensor], inner: Tensor, key: Tensor) -> None:
    """Round fp32 values [n, m] to bf16.

    `rows`: the bf16 shard [n, m], the values, and the indices first [n, 1]. Element (i, j) has the
    index first[i] + inner[j].

    bf16 is the upper half of fp32: 16 random bits are added to the lower half, whose carry is the
    rounding, and the lower half is cut off. A bf16 number stays as it is.
    """
    shard, values, first = rows
    word = mixed((first + inner) * signed(GOLDEN) + key)
    noise = (word >> 48).bitwise_and_(0xFFFF).int()
    moved = (values.view(torch.int32) + noise).bitwise_and_(-0x10000).view(torch.float32)
    # The bits of a NaN could overflow.
    shard.copy_(torch.where(values.isfinite(), moved, values))
