"""The DeviceMesh, with the axes pp, dp_replicate, dp_shard, cp, tp, slowest first.

An axis is a field of `AxisSizes` and a key of [parallel]; `apply.py` applies it to the model.
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
from titan_dit.objectives.base import DataShare
from titan_dit.parallel.p2p_groups import P2PGroups
from titan_dit.ranks import process_group

FILL = "dp_shard"
"""The axis that takes the remaining ranks."""


def axis(
    *, samples: bool = False, copies: bool = False, fsdp: bool = False, loss: bool = False
) -> Any:
    """A mesh axis and the roles of its ranks.

    `samples`: they read different samples. `copies`: they hold equal parameters, and
    FSDP all-reduces their gradients. `fsdp`: FSDP shards parameters over them. `loss`: each has a
    share of the loss. With neither `copies` nor `fsdp`, the parameters must differ between the
    ranks, as along pp, or be DTensors over them, as along tp: the gradient norm relies on it.
    """
    return field(default=1, metadata=dict(samples=samples, copies=copies, fsdp=fsdp, loss=loss))


@dataclass(frozen=True, kw_only=True)
class AxisSizes:
    """Ranks per axis, in mesh order."""

    pp: int = axis(loss=True)
    dp_replicate: int = axis(samples=True, copies=True, loss=True)
    dp_shard: int = axis(samples=True, fsdp=True, loss=True)
    cp: int = axis(fsdp=True, loss=True)
    tp: int = axis()

    def product(self, role: str, *, has: bool = True) -> int:
        """Product of the axes with a role (`has=False`: without it)."""
        return math.prod(getattr(self, name) for name in axes(role, has=has))

    @property
    def data(self) -> int:
        """Ranks that process different samples: dp_replicate x dp_shard."""
        return self.product("samples")

    @property
    def model(self) -> int:
        """Ranks that process the same samples: pp x cp x tp."""
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
    """Names of the axes with a role (`has=False`: without it), in mesh order."""
    return tuple(f.name for f in fields(AxisSizes) if f.metadata[role] == has)


AXES = tuple(f.name for f in fields(AxisSizes))
"""Names of all axes, in mesh order."""


def solve(config: ParallelConfig, world_size: int, resuming: bool = False) -> AxisSizes:
    """Resolve dp_shard=-1; on resume, `refit`. checks/ compares the product with the world size."""
    sizes = {f.name: getattr(config, f.name) for f in fields(AxisSizes)}
    if resuming:
        return refit(sizes, world_size)
    if sizes[FILL] == -1:
        others = math.prod(size for name, size in sizes.items() if name != FILL)
        sizes[FILL] = max(1, world_size // others)
    return AxisSizes(**sizes)


def refit(sizes: Mapping[str, int], world_size: int) -> AxisSizes:
    """Fit dp_shard, and dp_replicate if necessary, to `world_size`; pp, cp and tp are fixed."""
    found = {name: sizes[name] for name in axes("samples", has=False)}
    left = max(1, world_size // math.prod(found.values()))
    for name in axes("samples"):
        if name != FILL:
            found[name] = math.gcd(sizes[name], left)
            left //= found[name]
    return AxisSizes(**found, **{FILL: left})


def refitted(config: ParallelConfig, sizes: AxisSizes) -> list[str]:
    """A console line per configured size that `refit` has changed."""
    lines = []
    for name in axes("samples"):
        fixed, found = getattr(config, name), getattr(sizes, name)
        if fixed not in (-1, found):
            lines.append(f"[parallel] {name} follows the ranks: {fixed} -> {found}")
    return lines


class Mesh:
    """The DeviceMesh of a run and its submeshes."""

    def __init__(self, sizes: AxisSizes, device_type: str) -> None:
        self.sizes = sizes
        with process_group.opening(f"the process groups of {sizes}"):
            self.open(device_type)
        process_group.set_timeouts(process_group.STARTING.total_seconds())

    def open(self, device_type: str) -> None:
        """Open the process groups of the axes and of the flattened submeshes. Collective."""
        sizes, names = self.sizes, tuple(asdict(self.sizes))
        self.whole = init_device_mesh(
            device_type, tuple(asdict(sizes).values()), mesh_dim_names=names
        )
        # Kept: looking up a flattened mesh by name is deprecated.
        self.data = self.whole[axes("samples")]._flatten("data")
        self.shard = self.whole[axes("fsdp")]._flatten("shard")
        self.loss = self.whole[axes("loss")]._flatten("loss")
        copies, several = self.whole[axes("copies")], len(axes("copies")) > 1
        self.copies = copies._flatten("copies") if several else copies
        self.p2p = P2PGroups(self.whole["pp"])

    def axis(self, name: str) -> DeviceMesh:
        """The 1D submesh of an axis."""
        return self.whole[name]

    @property
    def data_rank(self) -> int:
        """Index of this rank's share of every batch."""
        return self.data.get_local_rank()

    @property
    def same_work(self) -> list[int]:
        """The ranks in the world that hold the same stages for the same samples: tp x cp ranks."""
        apart = (*axes("samples"), "pp")
        own = [
            self.whole[name].get_local_rank() if name in apart else slice(None)
            for name in self.whole.mesh_dim_names or ()
        ]
        ranks: list[int] = self.whole.mesh[tuple(own)].flatten().tolist()
        return ranks

    def same_samples(self, device: torch.device) -> DataShare:
        """Open the group of the ranks that read the same samples, along pp, cp and tp. Collective.

        A share is one of their number; `gather` joins the shares.
        """
        count = self.sizes.model
        if count == 1:
            return DataShare(device)
        same = self.whole[axes("samples", has=False)]._flatten("same_samples")
        group = same.get_group()
        return DataShare(
            device, same.get_local_rank(), count, lambda rows: gathered(rows, group, count)
        )

    @property
    def fsdp(self) -> DeviceMesh:
        """The mesh for FSDP2, over dp_shard and cp; 2D (copies, shard) for HSDP."""
        if self.sizes.product("copies") == 1:
            return self.shard
        others = [name for name in axes("fsdp") if name != FILL and getattr(self.sizes, name) > 1]
        (copies,) = self.copies.mesh_dim_names or ()
        if not others and copies in axes("copies"):
            return self.whole[copies, FILL]
        with warnings.catch_warnings():
            # torch has no other way to combine a plain and a flattened axis.
            warnings.filterwarnings("ignore", message="Slicing a flattened dim")
            return self.whole[copies, "shard"]

    @property
    def speaks_for_samples(self) -> bool:
        """True on one of the ranks that read the same samples: the one at 0 along pp, cp and tp."""
        names = axes("samples", has=False)
        return not any(self.whole[name].get_local_rank() for name in names)

    def sum_loss(self, value: Tensor) -> Tensor:
        """All-reduce the ranks' loss shares in fp32: a scalar, or several losses as a vector."""
        # fp32: ranks without a loss do not know its dtype.
        total = value.detach().float().clone()
        dist.all_reduce(total, group=self.loss.get_group())
        return total

    def sum_over_all(self, value: Tensor) -> Tensor:
        """All-reduce a tensor of any shape over all ranks."""
        total = value.clone()
        dist.all_reduce(total)
        return total

    def sum_over_data(self, value: Tensor) -> Tensor:
        """All-reduce a tensor of any shape over the data-parallel ranks."""
        total = value.clone()
        dist.all_reduce(total, group=self.data.get_group())
        return total

    def gather_over_data(self, rows: Tensor) -> Tensor:
        """All-gather rows [n, ...] over the data-parallel ranks, in order: [ranks * n, ...]."""
        return gathered(rows, self.data.get_group(), self.sizes.data)


def gathered(rows: Tensor, group: dist.ProcessGroup, num_ranks: int) -> Tensor:
    """All-gather rows [n, ...] over a group, in rank order: [ranks * n, ...]."""
    rows = rows.contiguous()  # Else the parts would have the strides of a permuted tensor.
    parts = [torch.empty_like(rows) for _ in range(num_ranks)]
    dist.all_gather(parts, rows, group=group)
    return torch.cat(parts)
