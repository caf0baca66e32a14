"""Steps, optimizer, learning rate, EMA, validation, previews."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from titan_dit.config.section import (
    Decay,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    UserError,
    show,
)


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Section):
    """How long, how many samples a step, and how a step is taken."""

    section = "training"

    steps: PositiveInt
    """Optimizer steps of the whole run."""
    global_batch_size: PositiveInt
    """Samples per step over all ranks = microbatch_size x data-parallel ranks x accumulation."""
    microbatch_size: PositiveInt | None = None
    """Samples of one forward pass on one rank; unset takes the rank's whole share, or 1 in a
    pipeline."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Clip the gradient to this global L2 norm; 0 switches clipping off."""
    deterministic: bool = False
    """Only deterministic kernels: a rerun repeats every bit, at some cost on a GPU."""
    gc_every: NonNegativeInt = 50
    """Steps between two runs of Python's garbage collector, on all ranks at once; 0 leaves it to
    Python, which runs it on every rank at another moment."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section):
    """AdamW (arXiv:1711.05101)."""

    section = "optimizer"

    name: Literal["adamw"] = "adamw"
    lr: PositiveFloat = 1e-4
    """Learning rate after the warm-up."""
    betas: tuple[Decay, ...] = (0.9, 0.999)
    """Decay of the first and of the second moment."""
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay, on every parameter."""
    fused: bool = True
    """The fused kernel; it alone can skip a bad step without waiting for the device."""

    def __post_init__(self) -> None:
        """Two betas, no more and no less."""
        super().__post_init__()
        if len(self.betas) != 2:
            raise UserError(f"[optimizer] betas={show(self.betas)} must hold two numbers.")


@dataclass(frozen=True, kw_only=True)
class LRScheduleConfig(Section):
    """Linear warm-up, then a decay that ends with the run."""

    section = "lr_schedule"

    warmup_steps: NonNegativeInt = 0
    decay: Literal["cosine", "linear", "constant"] = "constant"
    min_lr_ratio: Fraction = 0.0
    """Learning rate at the last step, as a part of [optimizer] lr."""


@dataclass(frozen=True, kw_only=True)
class EMAConfig(Section):
    """Exponential moving averages of the weights, one per decay."""

    section = "ema"

    decays: tuple[Decay, ...] = (0.9999,)
    """Empty switches EMA off. The first one is used for previews and sampling."""
    every: PositiveInt = 1
    """Steps between updates; the decay is raised to this power."""
    warmup: bool = True
    """Start with the decay min(decay, (1 + k) / (10 + k)) at update k."""

    def __post_init__(self) -> None:
        """Each decay once: it names the average."""
        super().__post_init__()
        if len(set(self.decays)) != len(self.decays):
            raise UserError(f"[ema] decays={show(self.decays)} names one decay twice.")


@dataclass(frozen=True, kw_only=True)
class ValidationConfig(Section):
    """The loss on samples that are not trained on."""

    section = "validation"

    every: NonNegativeInt = 0
    """Steps between validations; the last step is validated too. 0 validates never."""
    samples: NonNegativeInt = 0
    """Rows that leave the dataset for good, drawn by the seed, evenly over its classes; with `path`
    the rows that are read there, 0 for all."""
    path: str = ""
    """Another dataset of the same kind to validate on; empty takes rows of [data] itself."""

    def __post_init__(self) -> None:
        """Something to validate on."""
        super().__post_init__()
        if self.every and not self.samples and not self.path:
            raise UserError(
                f"[validation] every={self.every} has nothing to validate on. Set samples (rows of "
                "[data] that are left out of training) or path (another dataset)."
            )

    @property
    def num_held_out(self) -> int:
        """Rows that leave [data]."""
        return 0 if self.path else self.samples


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(Section):
    """Pictures drawn during training."""

    section = "sampling"

    every: NonNegativeInt = 0
    """Steps between previews; the last step is drawn too. 0 draws nothing."""
    num: PositiveInt = 40
    sampler: str = "auto"
    """heun or euler for rectified_flow, ddim or ddpm for ddpm; auto takes the first of them."""
    steps: PositiveInt = 25
    """Steps of the sampler."""
    eta: Fraction = 0.0
    """Noise that ddim adds on the way: 0 none, 1 as much as ddpm."""
    cfg_scale: NonNegativeFloat = 2.0
    """Classifier-free guidance: 1 is none."""
    cfg_channels: PositiveInt | None = None
    """Guide the first channels only (the original DiT's samples guide 3 of 4); unset guides all."""
