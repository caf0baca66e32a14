"""The keys of the optimizers, without torch, so that `--help` is quick."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from titan_dit.config.parameter_groups import GroupConfig
from titan_dit.config.section import (
    Bound,
    Decay,
    Named,
    NonNegativeFloat,
    PositiveFloat,
    UserError,
    show,
)


@dataclass(frozen=True, kw_only=True)
class OptimizerKeys(Named):
    """Keys of every optimizer."""

    section = "optimizer"

    lr: PositiveFloat = 1e-4
    """Peak learning rate, after warm-up."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay of every parameter."""
    groups: tuple[GroupConfig, ...] = ()
    """Parameters with another rate or weight decay, or frozen: [[optimizer.groups]] tables with
    pattern, lr or lr_factor, weight_decay, frozen."""


@dataclass(frozen=True, kw_only=True)
class AdamWKeys(OptimizerKeys):
    """AdamW (arXiv:1711.05101)."""

    name = "adamw"

    betas: tuple[Decay, ...] = (0.9, 0.999)
    """Decays of AdamW's first and second moments."""
    eps: PositiveFloat = 1e-8
    fused: bool = True
    """Use the fused kernel; only it skips bad steps without a host-device synchronisation."""

    def __post_init__(self) -> None:
        """Require two betas."""
        super().__post_init__()
        if len(self.betas) != 2:
            raise UserError(f"[optimizer] betas={show(self.betas)} must hold two numbers.")


@dataclass(frozen=True, kw_only=True)
class MuonKeys(AdamWKeys):
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
    match_rms_adamw: 0.2 sqrt(max(a, b)), so that lr and weight_decay may be those of AdamW.
    original: sqrt(max(1, a / b)); lr is then about 0.02, and adamw_lr must be set."""
    adamw_lr: PositiveFloat | None = None
    """Peak learning rate of the parameters that take AdamW; unset is lr."""
    matrices: tuple[str, ...] = ("blocks.*",)
    """Patterns of names: parameters with two dims among them take Muon."""
    fused_qkv: tuple[str, ...] = ("*.qkv.weight",)
    """Patterns of matrices with rows [heads, 3, head_dim]: queries, keys and values are
    orthogonalised one by one. Empty: each matrix as a whole."""

    def __post_init__(self) -> None:
        """Require adamw_lr with adjust_lr = "original"."""
        super().__post_init__()
        if self.adjust_lr == "original" and self.adamw_lr is None:
            raise UserError(
                '[optimizer] adjust_lr="original" gives Muon rates that are too large for AdamW. '
                "Set adamw_lr, such as 3e-4, for the parameters that take AdamW."
            )
