"""The whole of a run's configuration: [job], and every other section by its name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from titan_dit.config.layout import (
    CompileConfig,
    ParallelConfig,
    PipelineConfig,
    PrecisionConfig,
    RematConfig,
)
from titan_dit.config.operation import CheckpointConfig, FaultsConfig, MetricsConfig, ProfileConfig
from titan_dit.config.section import Bound, Section
from titan_dit.config.training import (
    EMAConfig,
    LRScheduleConfig,
    OptimizerConfig,
    SamplingConfig,
    TrainingConfig,
    ValidationConfig,
)

if TYPE_CHECKING:  # These import torch, which a wrong key must not wait for.
    from titan_dit.data.base import DataConfig
    from titan_dit.models.base import ModelConfig
    from titan_dit.objectives.base import ObjectiveConfig


@dataclass(frozen=True, kw_only=True)
class RunConfig(Section):
    """What the run is called, where it lives, and the one seed everything is drawn from."""

    section = "job"

    name: str = ""
    """Name of the run; empty takes the config file's."""
    dir: str = ""
    """Run directory; empty takes outputs/<name>."""
    seed: Annotated[int, Bound(least=0, below=2**63)] = 0
    """Seed of the weights, the data order, the noise and the samples."""
    hooks: tuple[str, ...] = ()
    """Classes of your own that are called as the run goes on: "package.module:Class", see
    docs/extending.md."""


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """A whole run. [model], [objective] and [data] are chosen by their `name` (catalog.py).

    Only the plan, validate.py and the trainer see the whole; everything else is given the sections
    that it reads.
    """

    job: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig
    objective: ObjectiveConfig
    data: DataConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    training: TrainingConfig
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    remat: RematConfig = field(default_factory=RematConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_schedule: LRScheduleConfig = field(default_factory=LRScheduleConfig)
    ema: EMAConfig = field(default_factory=EMAConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    faults: FaultsConfig = field(default_factory=FaultsConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)


FREE_ON_RESUME = frozenset(
    {
        "job.name",
        "job.dir",
        "job.hooks",
        "parallel",
        "pipeline",
        "remat",
        "compile",
        "checkpoint",
        "faults",
        "metrics",
        "sampling",
        "profile",
    }
    | {"training.steps", "training.microbatch_size", "training.deterministic", "training.gc_every"}
    | {"precision.attention"}
    # The numbers that a size stands for are compared one by one.
    | {"model.size"}
    # The dataset itself is compared by its digest; it may move, and be read differently.
    | {"data.name", "data.path", "data.workers", "data.verify"}
    # What it takes of the training data is compared by itself (`ValidationConfig.num_held_out`).
    | {"validation.every", "validation.samples", "validation.path"}
)
"""Sections and keys that a resumed run may change: they leave the mathematics as it was."""
