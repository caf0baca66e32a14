"""Checkpoints, faults, metrics, profiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from titan_dit.config.section import (
    Bound,
    FilePath,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Section,
    UserError,
    show,
)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section):
    """Checkpoint interval, retention and resume."""

    section = "checkpoint"

    every: NonNegativeInt = 1000
    """Steps between checkpoints; the last step is saved, too. 0 disables checkpoints."""
    keep: NonNegativeInt = 3
    """Newest checkpoints to keep; 0 keeps all."""
    keep_every: NonNegativeInt = 0
    """Also keep each checkpoint whose step is a multiple of this; 0 disables it."""
    async_save: bool = True
    """Write in the background: training waits only for the copy of the state to host memory."""
    max_failures: NonNegativeInt = 3
    """Stop after this many consecutive failed saves (disk full, no permission); 0 never stops."""
    dir: FilePath | None = None
    """Folder or URL (s3://bucket/run) of the checkpoints. Unset: RUN/checkpoints."""
    resume: FilePath = "auto"
    """auto: the run's newest checkpoint, if any. never: step 0, an error if there are checkpoints.
    A path or URL of a run (its newest checkpoint), its checkpoints folder, or one checkpoint:
    another run's initialises this run, one of its own rolls it back."""
    init: FilePath | None = None
    """Weights at which a new run starts: path or URL of a run, its checkpoints folder, or one
    checkpoint. Step, data position and optimizer state start anew; `resume` loads them, too."""
    init_weights: Literal["ema", "model"] = "ema"
    """Weights of `init` to load. ema: its first average, if it has one, else as model. model: the
    weights of its last step."""
    reinitialize: tuple[str, ...] = ()
    """Patterns of parameters that `init` leaves at their random values: "head.*"."""
    allow_changes: bool = False
    """Resume even if keys that change the mathematics (model, objective, data, ...) differ."""

    def __post_init__(self) -> None:
        """Raise UserError for `init` with a path in `resume`, or `reinitialize` without `init`."""
        super().__post_init__()
        if self.init and self.resume not in ("auto", "never"):
            raise UserError(
                f"[checkpoint] init={show(self.init)} and resume={show(self.resume)} are both set. "
                "Keep init for a new run, or resume to go on with the optimizer's moments."
            )
        if self.reinitialize and not self.init:
            raise UserError(
                f"[checkpoint] reinitialize={show(self.reinitialize)} draws parameters of init "
                "anew, but init is not set. Set init, or remove reinitialize."
            )


@dataclass(frozen=True, kw_only=True)
class FaultsConfig(Section):
    """Bad steps, rollback and hangs."""

    section = "faults"

    max_consecutive_bad_steps: NonNegativeInt = 100
    """After this many consecutive bad steps, roll back to the last good checkpoint and skip their
    samples; 0 never rolls back."""
    max_rollbacks: NonNegativeInt = 3
    """Stop after this many consecutive rollbacks without progress; 0 stops without a rollback."""
    spike_ratio: NonNegativeFloat = 0.0
    """Skip a step whose gradient norm (before clipping) exceeds this many times its running average
    over good steps (decay 0.99); 0 disables spike detection."""
    spike_after: PositiveInt = 100
    """Good steps before spike detection starts."""
    compare_replicas: bool = True
    """Compare the weights of the dp_replicate ranks, bit for bit, at the start and at each
    checkpoint; stop if they differ. false: GPUs of different kinds, whose rounding may differ."""
    log_samples: bool = False
    """Log every step's sample numbers to RUN/samples-seen, as proof that none is lost."""
    step_timeout_s: Annotated[float, Bound(least=0, most=1e8)] = 300.0
    """Seconds without a finished step before a rank dumps its stacks to RUN/hangs and exits; the
    launcher restarts the run. Loading, saving, sampling and the first step have at least 1,800.
    Timeouts of gloo and NCCL are set above these. 0 disables the watchdog."""


@dataclass(frozen=True, kw_only=True)
class MetricsConfig(Section):
    """Metrics of the training steps, and their writers."""

    section = "metrics"

    every: NonNegativeInt = 10
    """Steps between rows of metrics.jsonl and console lines. 0 still writes validations and the
    first step of a launch (of a resumed run, on the console only)."""
    tensorboard: bool = True
    """Metrics and previews for TensorBoard, in RUN/tensorboard."""
    wandb: bool = False
    """Metrics and previews for wandb (Weights & Biases); needs a package: pip install wandb."""
    wandb_project: str = "titan_dit"
    """Project of the wandb run."""
    wandb_entity: str | None = None
    """User or team of the wandb run. Unset: your default."""


@dataclass(frozen=True, kw_only=True)
class ProfileConfig(Section):
    """Profiler traces of a few steps, in RUN/profile."""

    section = "profile"

    enabled: bool = False
    start: PositiveInt = 10
    """First profiled step, counted from 1 at each launch; the first steps compile and warm up."""
    steps: PositiveInt = 3
    """Number of profiled steps."""
    ranks: tuple[NonNegativeInt, ...] = ()
    """Profiled ranks; empty is rank 0."""
    memory: bool = False
    """Record every GPU allocation with its stack, for torch's memory viewer."""
