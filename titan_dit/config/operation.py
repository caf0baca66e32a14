"""Checkpoints, faults, metrics, profiles."""

from __future__ import annotations

from dataclasses import dataclass

from titan_dit.config.section import NonNegativeFloat, NonNegativeInt, PositiveInt, Section


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section):
    """When to save, what to keep, where to go on from."""

    section = "checkpoint"

    every: NonNegativeInt = 1000
    """Steps between checkpoints; the last step is saved too. 0 saves nothing."""
    keep: NonNegativeInt = 3
    """Newest checkpoints to keep; 0 keeps all."""
    keep_every: NonNegativeInt = 0
    """Keep those of every so many steps for good, beside the newest; 0 keeps none of them."""
    async_save: bool = True
    """Copy the state and write it in the background; the step waits for the copy only, which takes
    as much host memory as the rank's state."""
    max_failures: NonNegativeInt = 3
    """Stop when so many saves in a row have failed (disk full, no permission); 0 never stops."""
    dir: str = ""
    """Where checkpoints lie: a folder, or a URL such as s3://bucket/run; empty takes checkpoints/
    in the run directory."""
    resume: str = "auto"
    """auto: the newest checkpoint of the run directory, if any. never: start afresh, refused
    where checkpoints exist. Anything else: the path or URL of a checkpoint."""
    allow_changes: bool = False
    """Resume although the config changes the mathematics (model, objective, data, ...)."""


@dataclass(frozen=True, kw_only=True)
class FaultsConfig(Section):
    """What to do when numbers go wrong, or nothing goes on."""

    section = "faults"

    max_consecutive_bad_steps: NonNegativeInt = 100
    """After this many skipped steps in a row go back to the last good checkpoint and leave their
    data out; 0 never does."""
    max_rollbacks: NonNegativeInt = 3
    """Stop when the run would go back once more without having come any further; 0 stops at once,
    without going back."""
    spike_ratio: NonNegativeFloat = 0.0
    """Skip a step whose gradient norm (before clipping) is more than this many times its running
    average over the good steps (decay 0.99); 0 skips none for it."""
    spike_after: PositiveInt = 100
    """Good steps before the average is trusted."""
    log_samples: bool = False
    """Write the sample numbers of every step to RUN/samples-seen: proof that none was lost."""
    step_timeout_s: NonNegativeFloat = 300.0
    """Seconds without a step after which a rank writes its stacks to hangs/ and ends, so that the
    launcher starts the run again. Loading, saving, drawing and the first step have 1,800 or more.
    Keep it below NCCL's own 600. 0 never ends a run."""


@dataclass(frozen=True, kw_only=True)
class MetricsConfig(Section):
    """What is written while training."""

    section = "metrics"

    every: NonNegativeInt = 10
    """Steps between lines of metrics.jsonl and of the console; 0 writes none."""
    tensorboard: bool = True
    wandb: bool = False
    """Needs the extra: pip install 'titan_dit[wandb]'."""


@dataclass(frozen=True, kw_only=True)
class ProfileConfig(Section):
    """Traces of a few steps, in RUN/profile: where their time went."""

    section = "profile"

    enabled: bool = False
    start: PositiveInt = 10
    """First profiled step, counted from 1 at every launch; the first ones compile and warm up."""
    steps: PositiveInt = 3
    """Steps that are profiled."""
    ranks: tuple[NonNegativeInt, ...] = ()
    """Ranks that are profiled; empty is rank 0."""
    memory: bool = False
    """On a GPU also write every allocation with its stack, for torch's memory viewer."""
