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

from titan_dit.config import ParallelConfig, TrainingConfig
from titan_dit.section import UserError


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
    """Fill in dp_shard=-1 and check the product against the ranks that were started.

    `following`: of a run that has begun and may come back on other ranks, see `follow`.
    """
    sizes = {f.name: getattr(config, f.name) for f in fields(AxisSizes)}
    if sizes["dp_shard"] == 0:
        raise UserError("[parallel] dp_shard=0 is no size. Set dp_shard = -1 or at least 1.")
    if following:
        return follow(sizes, world_size)
    others = math.prod(size for axis, size in sizes.items() if axis != "dp_shard")
    fits, fill = world_size % others == 0, sizes["dp_shard"] == -1
    if fill and fits:
        sizes["dp_shard"] = world_size // others
    shown = [f"{a}={n}" for a, n in sizes.items() if n > 1 or (a == "dp_shard" and not fill)]
    factors, were = " x ".join(shown), "was" if world_size == 1 else "were"
    if fill and not fits:
        raise UserError(
            f"[parallel] {factors} does not divide the {world_size} ranks started. "
            f"Launch a multiple of {others} ranks, or change the sizes."
        )
    if (product := math.prod(sizes.values())) != world_size:
        fix = f"Set dp_shard = {world_size // others} or launch" if fits else "Launch"
        raise UserError(
            f"[parallel] {factors} = {product} ranks, but {world_size} {were} started. "
            f"{fix} {product} ranks."
        )
    return AxisSizes(**sizes)


def follow(sizes: Mapping[str, int], world_size: int) -> AxisSizes:
    """pp, cp and tp stay as they are; dp_replicate and dp_shard share the ranks there are.

    dp_replicate stays if it can, else it is the largest part of itself that divides the ranks.
    """
    kept = {axis: sizes[axis] for axis in ("pp", "cp", "tp")}
    one_model = math.prod(kept.values())
    if world_size % one_model:
        below, above = world_size // one_model * one_model, -(-world_size // one_model) * one_model
        factors = " x ".join(f"{axis}={size}" for axis, size in kept.items() if size > 1)
        were = "was" if world_size == 1 else "were"
        raise UserError(
            f"[parallel] {factors}: a model takes {one_model} ranks, which do not divide the "
            f"{world_size} that {were} started. The run can go on with "
            f"{' or '.join(str(ranks) for ranks in (below, above) if ranks)} ranks (any multiple "
            f"of {one_model}), or with smaller {', '.join(a for a in kept if kept[a] > 1)}."
        )
    data = world_size // one_model
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


def check_batch(training: TrainingConfig, sizes: AxisSizes, following: bool = False) -> None:
    """The global batch must divide into microbatches on every data-parallel rank.

    A run that has begun holds its batch with rows of weight 0: it only needs a sample a rank.
    """
    batch, micro, ranks = training.global_batch_size, training.microbatch_size, sizes.data
    if following:
        if ranks > batch:
            model = sizes.pp * sizes.cp * sizes.tp
            raise UserError(
                f"[training] global_batch_size={batch} cannot be held by {ranks} data-parallel "
                f"ranks: there are more ranks than samples. Launch {batch * model} ranks at most."
            )
        return
    unit = (micro or 1) * ranks
    if batch % unit:
        below, above = batch // unit * unit, (batch // unit + 1) * unit
        valid = " or ".join(str(size) for size in (below, above) if size)
        per_rank = f"microbatch_size={micro} x " if micro else ""
        raise UserError(
            f"[training] global_batch_size={batch} does not divide into {per_rank}"
            f"{ranks} data-parallel ranks. Set global_batch_size = {valid}."
        )


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

    def gather_over_data(self, rows: Tensor) -> Tensor:
        """Every data rank's rows (equally many), in the order of ranks, on every rank."""
        parts = [torch.empty_like(rows) for _ in range(self.sizes.data)]
        dist.all_gather(parts, rows.contiguous(), group=self.data.get_group())
        return torch.cat(parts)
