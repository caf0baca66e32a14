"""One named DeviceMesh. Its axes, slowest first: pp, dp_replicate, dp_shard, cp, tp."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titan_dit.config.layout import ParallelConfig


@dataclass(frozen=True, kw_only=True)
class AxisSizes:
    """Ranks along each axis, in the order of the mesh."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def data(self) -> int:
        """Ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def shards(self) -> int:
        """Ranks that hold different parts of the parameters."""
        return self.pp * self.dp_shard * self.cp * self.tp

    def __str__(self) -> str:
        """The axes above 1, such as "dp_shard 2 x tp 4"."""
        above = [f"{axis} {size}" for axis, size in asdict(self).items() if size > 1]
        return " x ".join(above) or "one rank"


def solve(config: ParallelConfig, world_size: int, following: bool = False) -> AxisSizes:
    """Fill in dp_shard=-1; whether the product is the number of ranks is for validate to say.

    `following`: of a run that has begun and may come back on other ranks, see `follow`.
    """
    sizes = {f.name: getattr(config, f.name) for f in fields(AxisSizes)}
    if following:
        return follow(sizes, world_size)
    if sizes["dp_shard"] == -1:
        others = math.prod(size for axis, size in sizes.items() if axis != "dp_shard")
        sizes["dp_shard"] = max(1, world_size // others)
    return AxisSizes(**sizes)


def follow(sizes: Mapping[str, int], world_size: int) -> AxisSizes:
    """pp, cp and tp stay as they are; dp_replicate and dp_shard share the ranks there are.

    dp_replicate stays if it can, else it is the largest part of itself that divides the ranks.
    """
    kept = {axis: sizes[axis] for axis in ("pp", "cp", "tp")}
    data = max(1, world_size // math.prod(kept.values()))
    replicate = math.gcd(sizes["dp_replicate"], data)
    return AxisSizes(**kept, dp_replicate=replicate, dp_shard=data // replicate)


def followed(config: ParallelConfig, sizes: AxisSizes) -> list[str]:
    """A line for every size that the config fixes and the ranks have changed."""
    lines = []
    for axis in ("dp_replicate", "dp_shard"):
        fixed, found = getattr(config, axis), getattr(sizes, axis)
        if fixed not in (-1, found):
            lines.append(f"[parallel] {axis} follows the ranks: {fixed} -> {found}")
    return lines


class Mesh:
    """The DeviceMesh of a run and the parts of it that others ask for."""

    def __init__(self, sizes: AxisSizes, device_type: str) -> None:
        self.sizes = sizes
        axes = asdict(sizes)
        self.whole = init_device_mesh(
            device_type, tuple(axes.values()), mesh_dim_names=tuple(axes.keys())
        )
        # Kept: asking for a flattened mesh by its name again is deprecated.
        self.data = self.whole["dp_replicate", "dp_shard"]._flatten("data")
        self.shard = self.whole["dp_shard", "cp"]._flatten("shard")
        self.loss = self.whole["pp", "dp_replicate", "dp_shard", "cp"]._flatten("loss")

    @property
    def data_rank(self) -> int:
        """Which part of every batch this rank reads."""
        return self.data.get_local_rank()

    @property
    def fsdp(self) -> DeviceMesh:
        """Where parameters are sharded; 2D (replicate, shard) for HSDP.

        The ranks of one sample's parts (cp) share parameters as those of different samples do.
        """
        if self.sizes.dp_replicate == 1:
            return self.shard
        if self.sizes.cp == 1:
            return self.whole["dp_replicate", "dp_shard"]
        with warnings.catch_warnings():
            # There is no other way yet to a mesh of a plain and a flattened axis.
            warnings.filterwarnings("ignore", message="Slicing a flattened dim")
            return self.whole["dp_replicate", "shard"]

    @property
    def pp(self) -> DeviceMesh:
        """The ranks that hold the stages of this rank's pipeline."""
        return self.whole["pp"]

    @property
    def cp(self) -> DeviceMesh:
        """The ranks that hold the slices of this rank's samples."""
        return self.whole["cp"]

    @property
    def tp(self) -> DeviceMesh:
        """The tensor-parallel ranks of this rank's model shard."""
        return self.whole["tp"]

    @property
    def speaks_for_samples(self) -> bool:
        """Whether this rank is the first of those that work on the same samples."""
        return not any(self.whole[axis].get_local_rank() for axis in ("pp", "cp", "tp"))

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
