"""The [optimizer] sections: the keys of every optimizer, and what builds it.

Nothing here imports torch when it is imported, so that `--help` is quick.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

from titan_dit.config.limits import columns_of_any_tp
from titan_dit.config.parameter_groups import GroupConfig, groups_of
from titan_dit.config.section import (
    Bound,
    Decay,
    Named,
    NonNegativeFloat,
    PositiveFloat,
    UserError,
    show,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

    from titan_dit.models.base import ModelSpec
    from titan_dit.optim.optimizer import Optimizer

Parameters: TypeAlias = "Mapping[str, nn.Parameter]"
Group = dict[str, Any]
"""Parameters with equal settings: "params", "lr", "lr_factor", "weight_decay" and others."""
PROJECTIONS = 3
"""Queries, keys and values."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Named):
    """The [optimizer] section: keys of every optimizer, and what builds it."""

    section = "optimizer"

    lr: PositiveFloat = 1e-4
    """Peak learning rate, after warm-up."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay of every parameter."""
    groups: tuple[GroupConfig, ...] = ()
    """Parameters with another rate or weight decay, or frozen: [[optimizer.groups]] tables with
    pattern, lr or lr_factor, weight_decay, frozen."""

    whole_tensors: ClassVar[bool] = False
    """True if it cannot update a part of a tensor. Layouts that shard tensors are then refused."""

    def build(self, parameters: Parameters, model_spec: ModelSpec) -> Optimizer:
        """The optimizer of these parameters of a rank: all that are trained, plain or sharded."""
        raise NotImplementedError

    def num_moments(self, name: str, shape: Sequence[int]) -> float:
        """Size of a parameter's optimizer state, in fp32 tensors of its shape (AdamW: 2).

        Memory checks use it.
        """
        return 1

    def check(self, shapes: Mapping[str, torch.Size], model_spec: ModelSpec) -> None:
        """Raise UserError if the optimizer cannot train these parameters of the whole model."""

    def lines(self, shapes: Mapping[str, torch.Size]) -> Iterator[str]:
        """Console lines about `shapes`, all trained parameters of the whole model."""
        return iter(())

    def grouped(
        self,
        parameters: Parameters,
        settings: Callable[[str, nn.Parameter], Mapping[str, Hashable]] = lambda *_: {},
    ) -> list[Group]:
        """Groups of parameters with equal settings and dtype, for torch.

        `settings`: (name, parameter) -> what an optimizer adds to [optimizer] groups.
        """
        special = groups_of(parameters, self.groups)
        found: dict[Hashable, Group] = {}
        for name, parameter in parameters.items():
            group = special.get(name)
            decay = None if group is None else group.weight_decay
            keys: dict[str, Any] = {
                "lr_factor": 1.0 if group is None else group.factor(self.lr),
                "weight_decay": self.weight_decay if decay is None else decay,
            }
            own = dict(settings(name, parameter))
            factor: Any = own.pop("lr_factor", 1.0)
            if group is None or group.lr is None:  # A group's lr is absolute.
                keys["lr_factor"] *= factor
            keys |= own
            made = found.setdefault(
                (parameter.dtype, *keys.items()), {"params": [], "names": [], **keys}
            )
            made["params"].append(parameter)
            made["names"].append(name)
        return list(found.values())


@dataclass(frozen=True, kw_only=True)
class AdamWConfig(OptimizerConfig):
    """AdamW (arXiv:1711.05101)."""

    name = "adamw"

    betas: tuple[Decay, ...] = (0.9, 0.999)
    """Decays of AdamW's first and second moments."""
    eps: PositiveFloat = 1e-8
    fused: bool = True
    """Use the fused kernel; only it skips bad steps without a host-device synchronisation."""

    def __post_init__(self) -> None:
        """Raise UserError unless there are two betas."""
        super().__post_init__()
        if len(self.betas) != 2:
            raise UserError(
                f"[optimizer] betas={show(self.betas)} must hold two numbers, such as [0.9, 0.999]."
            )

    def build(self, parameters: Parameters, model_spec: ModelSpec) -> Optimizer:
        """AdamW over plain or sharded parameters."""
        from titan_dit.optim.adamw import AdamW

        return AdamW(self.grouped(parameters), self.defaults)

    def num_moments(self, name: str, shape: Sequence[int]) -> float:
        """The first and the second moment."""
        return 2

    @property
    def defaults(self) -> dict[str, Any]:
        """Settings of all groups."""
        keys = ("lr", "betas", "eps", "fused")
        return {key: getattr(self, key) for key in keys}


@dataclass(frozen=True, kw_only=True)
class QuantizedAdamWConfig(AdamWConfig):
    """AdamW whose moments of matrices are quantised, by blocks with a scale."""

    fused: bool = True
    """On a GPU, one compiled kernel for the update of a matrix; the fused one for other tensors."""

    bits: ClassVar[Literal["8", "4", "float8"]]
    """Format of a moment's codes."""
    largest_block: ClassVar[int] = 256
    """Maximum elements of a block."""
    least_elements: ClassVar[int] = 4096
    """Elements from which a matrix is quantised."""
    least_block: ClassVar[int] = 16
    """Matrices whose blocks would be smaller are not quantised."""

    def build(self, parameters: Parameters, model_spec: ModelSpec) -> Optimizer:
        """Quantised AdamW over plain or sharded parameters."""
        from titan_dit.optim import quantized_adamw

        return quantized_adamw.build(self, parameters)

    def block(self, shape: Sequence[int]) -> int:
        """Elements of a parameter that share a scale; 0 if its moments stay fp32.

        `shape`: that of the whole parameter. Every layout has the same blocks: they divide the
        columns that a rank has with any tp from 1 to 8 that divides the columns. They are even:
        two codes of 4 bits share a byte.
        """
        if len(shape) < 2 or math.prod(shape) < self.least_elements:
            return 0
        least = columns_of_any_tp(shape[-1])
        even = range(self.least_block, self.largest_block + 1, 2)
        fitting = (size for size in even if least % size == 0)
        return max(fitting, default=0)

    def num_moments(self, name: str, shape: Sequence[int]) -> float:
        """Two moments of one byte or half a byte an element, and their scales."""
        block = self.block(shape)
        return 2 * ((0.125 if self.bits == "4" else 0.25) + 1 / block) if block else 2

    def lines(self, shapes: Mapping[str, torch.Size]) -> Iterator[str]:
        """Console line: what is quantised, and the memory of all moments."""
        sizes = {name: math.prod(shape) for name, shape in shapes.items()}
        done = [name for name, shape in shapes.items() if self.block(shape)]
        held = sum(self.num_moments(name, shapes[name]) * size for name, size in sizes.items())
        whole = 2 * sum(sizes.values())
        yield (
            f"{self.name}  moments of {len(done)} matrices, "
            f"{sum(sizes[name] for name in done) / max(1, sum(sizes.values())):.1%} of the "
            f"elements; {whole / max(1e-9, held):.1f} times smaller than in fp32"
        )


@dataclass(frozen=True, kw_only=True)
class AdamW8bitConfig(QuantizedAdamWConfig):
    """AdamW with moments in 8 bits (arXiv:2110.02861)."""

    name = "adamw8bit"
    bits = "8"


@dataclass(frozen=True, kw_only=True)
class AdamW4bitConfig(QuantizedAdamWConfig):
    """AdamW with moments in 4 bits (arXiv:2309.01507)."""

    name = "adamw4bit"
    bits = "4"
    largest_block = 128


@dataclass(frozen=True, kw_only=True)
class AdamWFp8Config(QuantizedAdamWConfig):
    """AdamW with moments in float8, e4m3."""

    name = "adamw_fp8"
    bits = "float8"


@dataclass(frozen=True, kw_only=True)
class MuonConfig(AdamWConfig):
    """Muon for matrices (arXiv:2502.16982), AdamW for all other parameters."""

    name = "muon"

    momentum: Decay = 0.95
    """Decay of the momentum."""
    nesterov: bool = True
    """Use Nesterov momentum."""
    ns_steps: Annotated[int, Bound(least=1, most=100)] = 5
    """Newton-Schulz iterations."""
    ns_dtype: Literal["bf16", "fp32"] = "bf16"
    """Format of the Newton-Schulz iterations and of the matrices that ranks exchange for them."""
    adjust_lr: Literal["original", "match_rms_adamw"] = "match_rms_adamw"
    """Factor of a matrix [a, b] on its learning rate, as torch.optim.Muon's adjust_lr_fn.
    match_rms_adamw: 0.2 sqrt(max(a, b)), so that AdamW's lr and weight_decay fit. original:
    sqrt(max(1, a / b)); lr is then about 0.02, and adamw_lr must be set."""
    adamw_lr: PositiveFloat | None = None
    """Peak learning rate of the parameters that take AdamW; unset is lr."""
    matrices: tuple[str, ...] = ("blocks.*",)
    """Patterns of names: parameters with two dims among them take Muon."""
    fused_qkv: tuple[str, ...] = ("*.qkv.weight",)
    """Patterns of matrices with rows [heads, 3, head_dim]: queries, keys and values are
    orthogonalised one by one. Empty: each matrix as a whole."""

    def __post_init__(self) -> None:
        """Raise UserError for adjust_lr = "original" without adamw_lr."""
        super().__post_init__()
        if self.adjust_lr == "original" and self.adamw_lr is None:
            raise UserError(
                '[optimizer] adjust_lr="original" gives Muon rates that are too large for AdamW. '
                "Set adamw_lr, such as 3e-4, for the parameters that take AdamW."
            )

    def build(self, parameters: Parameters, model_spec: ModelSpec) -> Optimizer:
        """Muon over plain or sharded parameters."""
        from titan_dit.optim import muon

        return muon.build(self, parameters, model_spec)

    def takes(self, name: str, shape: Sequence[int]) -> bool:
        """True if a parameter takes Muon."""
        return len(shape) == 2 and any(fnmatchcase(name, p) for p in self.matrices)

    def num_moments(self, name: str, shape: Sequence[int]) -> float:
        """One momentum, or AdamW's two."""
        return 1 if self.takes(name, shape) else super().num_moments(name, shape)

    def projections(self, name: str) -> int:
        """Number of matrices in a parameter's rows: 3 for a fused qkv, else 1."""
        return PROJECTIONS if any(fnmatchcase(name, p) for p in self.fused_qkv) else 1

    def check(self, shapes: Mapping[str, torch.Size], model_spec: ModelSpec) -> None:
        """Raise UserError for patterns without a matrix, or fused_qkv for rows of other layouts."""
        own = {name: shape for name, shape in shapes.items() if self.takes(name, shape)}
        if not own:
            raise UserError(
                f"[optimizer] matrices={show(self.matrices)} matches no parameter with two dims: "
                'nothing takes Muon. Set other patterns, or name = "adamw".'
            )
        for pattern in self.matrices:
            if not any(fnmatchcase(name, pattern) for name in own):
                raise UserError(
                    f"[optimizer] matrices: the pattern {show(pattern)} matches no parameter with "
                    "two dims. Remove it, or correct it."
                )
        for pattern in self.fused_qkv:
            is_default = self.fused_qkv == type(self).fused_qkv
            if not is_default and not any(fnmatchcase(name, pattern) for name in own):
                raise UserError(
                    f"[optimizer] fused_qkv: the pattern {show(pattern)} matches no matrix that "
                    "takes Muon. Remove it, or correct it."
                )
        # With grouped queries the rows can be as many, in another order.
        grouped = model_spec.num_key_value_heads not in (None, model_spec.num_heads)
        for name, shape in own.items():
            fits = not grouped and shape[0] % (PROJECTIONS * model_spec.head_dim) == 0
            if self.projections(name) > 1 and not fits:
                raise UserError(
                    f"[optimizer] fused_qkv={show(self.fused_qkv)} matches {name} with {shape[0]} "
                    f"rows, which are not [heads, 3, {model_spec.head_dim}]. Narrow the pattern, "
                    "or set fused_qkv = []."
                )

    def lines(self, shapes: Mapping[str, torch.Size]) -> Iterator[str]:
        """Console line: number of matrices that take Muon, and of fused qkv among them."""
        own = [name for name, shape in shapes.items() if self.takes(name, shape)]
        split = sum(self.projections(name) > 1 for name in own)
        yield (
            f"muon    {len(own)} matrices, {split} of them as queries, keys and values; AdamW for "
            f"{len(shapes) - len(own)} tensors"
        )
