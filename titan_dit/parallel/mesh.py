"""One named DeviceMesh. Its axes, slowest first: pp, dp_replicate, dp_shard, cp, tp.

An axis is a field of `AxisSizes`, which says what its ranks have of their own, and a key of
[parallel]; `parallel/apply.py` does to the model what it stands for.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titan_dit.config.layout import ParallelConfig

FILL = "dp_shard"
"""The axis that takes the ranks that are left."""


def axis(
    *, samples: bool = False, copies: bool = False, fsdp: bool = False, loss: bool = False
) -> Any:
    """A mesh axis, by what differs between its ranks.

    `samples`: they read different samples. `copies`: they hold equal parameters. `fsdp`: FSDP
    shards parameters over them. `loss`: each has a share of the loss.
    """
    return field(default=1, metadata=dict(samples=samples, copies=copies, fsdp=fsdp, loss=loss))


@dataclass(frozen=True, kw_only=True)
class AxisSizes:
    """Ranks along each axis, in the order of the mesh."""

    pp: int = axis(loss=True)
    dp_replicate: int = axis(samples=True, copies=True, loss=True)
    dp_shard: int = axis(samples=True, fsdp=True, loss=True)
    cp: int = axis(fsdp=True, loss=True)
    tp: int = axis()

    def product(self, role: str, *, has: bool = True) -> int:
        """Ranks along all axes that have a role of `axis`, or that have it not."""
        return math.prod(getattr(self, name) for name in axes(role, has=has))

    @property
    def data(self) -> int:
        """Ranks that read different samples."""
        return self.product("samples")

    @property
    def model(self) -> int:
        """Ranks that work on the same samples."""
        return self.product("samples", has=False)

    @property
    def shards(self) -> int:
        """Ranks that hold different parts of the parameters."""
        return self.product("copies", has=False)

    def __str__(self) -> str:
        """The axes above 1, such as "dp_shard 2 x tp 4"."""
        above = [f"{name} {size}" for name, size in asdict(self).items() if size > 1]
        return " x ".join(above) or "one rank"


def axes(role: str, *, has: bool = True) -> tuple[str, ...]:
    """Names of the axes that have a role of `axis`, or that have it not, in the mesh's order."""
    return tuple(f.name for f in fields(AxisSizes) if f.metadata[role] == has)


def solve(config: ParallelConfig, world_size: int, resuming: bool = False) -> AxisSizes:
    """Fill in dp_shard=-1; whether the product is the number of ranks is for checks/ to say.

    `following`: of a run that has begun and may come back on other ranks, see `refit`.
    """
    sizes = {f.name: getattr(config, f.name) for f in fields(AxisSizes)}
    if resuming:
        return refit(sizes, world_size)
    if sizes[FILL] == -1:
        others = math.prod(size for name, size in sizes.items() if name != FILL)
        sizes[FILL] = max(1, world_size // others)
    return AxisSizes(**sizes)


def refit(sizes: Mapping[str, int], world_size: int) -> AxisSizes:
    """pp, cp and tp stay as they are; dp_replicate and dp_shard share the ranks there are.

    dp_replicate stays if it can, else it is the largest part of itself that divides the ranks.
    """
    found = {name: sizes[name] for name in axes("samples", has=False)}
    left = max(1, world_size // math.prod(found.values()))
    for name in axes("samples"):
        if name != FILL:
            found[name] = math.gcd(sizes[name], left)
            left //= found[name]
    return AxisSizes(**found, **{FILL: left})


def refitted(config: ParallelConfig, sizes: AxisSizes) -> list[str]:
    """A line for every size that the config fixes and the ranks have changed."""
    lines = []
    for name in axes("samples"):
        fixed, found = getattr(config, name), getattr(sizes, name)
        if fixed not in (-1, found):
            lines.append(f"[parallel] {name} follows the ranks: {fixed} -> {found}")
    return lines


class Mesh:
    """The DeviceMesh of a run and the parts of it that others ask for."""

    def __init__(self, sizes: AxisSizes, device_type: str) -> None:
        self.sizes = sizes
        names = tuple(asdict(sizes))
        self.whole = init_device_mesh(
            device_type, tuple(asdict(sizes).values()), mesh_dim_names=names
        )
        # Kept: asking for a flattened mesh by its name again is deprecated.
        self.data = self.whole[axes("samples")]._flatten("data")
        self.shard = self.whole[axes("fsdp")]._flatten("shard")
        self.loss = self.whole[axes("loss")]._flatten("loss")
        self.copies = axes("copies")[0]
        if len(axes("copies")) > 1:
            self.copies = "copies"
            self.whole[axes("copies")]._flatten(self.copies)

    def axis(self, name: str) -> DeviceMesh:
        """The ranks along one axis that this rank is among."""
        return self.whole[name]

    @property
    def data_rank(self) -> int:
        """Which part of every batch this rank reads."""
        return self.data.get_local_rank()

    @property
    def fsdp(self) -> DeviceMesh:
        """Where parameters are sharded; 2D (copies, shard) for HSDP.

        The ranks of one sample's parts (cp) share parameters as those of different samples do.
        """
        if self.sizes.product("copies") == 1:
            return self.shard
        several = [name for name in axes("fsdp") if getattr(self.sizes, name) > 1]
        if len(several) < 2 and self.copies in axes("copies"):
            return self.whole[self.copies, (several or [FILL])[0]]
        with warnings.catch_warnings():
            # There is no other way yet to a mesh of a plain and a flattened axis.
            warnings.filterwarnings("ignore", message="Slicing a flattened dim")
            return self.whole[self.copies, "shard"]

    @property
    def speaks_for_samples(self) -> bool:
        """True on the first of the ranks that work on the same samples."""
        names = axes("samples", has=False)
        return not any(self.whole[name].get_local_rank() for name in names)

    def sum_loss(self, value: Tensor) -> Tensor:
        """Sum of the ranks' shares of the loss: over samples, parts of samples and stages.

        Of one loss, or of several at once.
        """
        # fp32: ranks without a loss would not know its format.
        total = value.detach().float().clone()
        dist.all_reduce(total, group=self.loss.get_group())
        return total

    def sum_over_data(self, value: Tensor) -> Tensor:
        """Sum over the ranks that read different samples."""
        total = value.clone()
        dist.all_reduce(total, group=self.data.get_group())
        return total

    def gather_over_data(self, rows: Tensor) -> Tensor:
        """Every data rank's rows (equally many), in the order of ranks, on every rank."""
        parts = [torch.empty_like(rows) for _ in range(self.sizes.data)]
        dist.all_gather(parts, rows.contiguous(), group=self.data.get_group())
        return torch.cat(parts)
