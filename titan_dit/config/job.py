"""The config of a run: [job] and all other sections."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from titan_dit.config.layout import (
    ActivationCheckpointConfig,
    CompileConfig,
    OffloadConfig,
    ParallelConfig,
    PipelineConfig,
    PrecisionConfig,
)
from titan_dit.config.operation import CheckpointConfig, FaultsConfig, MetricsConfig, ProfileConfig
from titan_dit.config.parameter_groups import with_frozen
from titan_dit.config.section import Bound, FilePath, Section, UserError, paths_of, show
from titan_dit.config.training import (
    EMAConfig,
    FIDConfig,
    GenerationConfig,
    LoRAConfig,
    LRSchedulerConfig,
    RepaConfig,
    SamplingConfig,
    TextConfig,
    TrainingConfig,
    ValidationConfig,
)

if TYPE_CHECKING:  # Config imports no higher package; `models.base` would import torch, too.
    from titan_dit.data.sections import DataConfig
    from titan_dit.models.base import ModelConfig
    from titan_dit.objectives.sections import ObjectiveConfig
    from titan_dit.optim.sections import OptimizerConfig


NEW_RUN = {"data_order": "feistel", "initial_weights": "counter"}
"""Values of "auto" in a new run."""


@dataclass(frozen=True, kw_only=True)
class JobSection(Section):
    """Name, directory, seed and hooks of the run."""

    section = "job"

    name: str = ""
    """Run name. Left out: the config file's name."""
    dir: FilePath | None = None
    """Run directory. Unset: outputs/<name>."""
    seed: Annotated[int, Bound(least=0, below=2**63)] = 0
    """Seed of initial weights, data order, noise and previews."""
    data_order: Literal["auto", "feistel", "sort"] = "auto"
    """Serves old runs. Permutation of an epoch. feistel: by a Feistel network, in O(batch) memory;
    below 65,536 rows by sorting. sort: always by sorting, in O(rows), as older runs do. auto: a
    started run keeps its own, a new one takes feistel."""
    initial_weights: Literal["auto", "counter", "generator"] = "auto"
    """Serves old runs. Initial weights by a counter, equal on every device, or by the device's
    generator, as older runs do. auto: a started run keeps its own, a new one takes counter."""
    hooks: tuple[str, ...] = ()
    """Your hook classes, "package.module:Class": see docs/extending.md."""

    @property
    def folder(self) -> Path:
        """The run directory."""
        return Path(self.dir or f"outputs/{self.name}")

    def check_name(self) -> None:
        """Raise UserError for a name that is not one folder's.

        Runs of older versions may have such a name.
        """
        if self.name in (".", "..") or any(c in self.name for c in "/\0"):
            raise UserError(
                f"[job] name={show(self.name)} must be the name of one folder: no slash, not "
                '"..". Set a plain name; --job.dir names a folder anywhere.'
            )

    def settled(self, kept: Mapping[str, str] | None = None) -> JobSection:
        """Replace every "auto" by the value in `kept`, the started run's, or by a new run's."""
        found: dict[str, Any] = {
            key: (kept or {}).get(key, new)
            for key, new in NEW_RUN.items()
            if getattr(self, key) == "auto"
        }
        return replace(self, **found)


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """A whole run. `name` selects the class of [model], [objective], [data], [optimizer].

    Only plan.py, opening.py, checks/, train.py, the trainer, dry_run/, planner/ and the commands
    see the whole config; all other code is given the sections that it reads.
    """

    job: JobSection = field(default_factory=JobSection)
    model: ModelConfig
    objective: ObjectiveConfig
    data: DataConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    training: TrainingConfig
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    activation_checkpoint: ActivationCheckpointConfig = field(
        default_factory=ActivationCheckpointConfig
    )
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    optimizer: OptimizerConfig
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    repa: RepaConfig = field(default_factory=RepaConfig)
    lr_scheduler: LRSchedulerConfig = field(default_factory=LRSchedulerConfig)
    ema: EMAConfig = field(default_factory=EMAConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    faults: FaultsConfig = field(default_factory=FaultsConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    text: TextConfig = field(default_factory=TextConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    fid: FIDConfig = field(default_factory=FIDConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)

    def paths(self) -> Iterator[tuple[str, str]]:
        """Yield (key, path) for each path of the run."""
        for f in fields(self):
            section: Section = getattr(self, f.name)
            for name, path, _ in paths_of(section):
                yield f"[{section.section}] {name}", path
        yield "[job] dir", str(self.job.folder)

    def __post_init__(self) -> None:
        """Move [training] frozen to [optimizer] groups: both ways to write it are one config."""
        if self.training.frozen:
            groups = with_frozen(self.optimizer.groups, self.training.frozen)
            object.__setattr__(self, "optimizer", replace(self.optimizer, groups=groups))
            object.__setattr__(self, "training", replace(self.training, frozen=()))


FREE_ON_RESUME = frozenset(
    {"job.name", "job.dir", "job.hooks"}
    | {"parallel", "pipeline", "activation_checkpoint", "offload", "compile"}
    | {"checkpoint", "faults", "metrics", "sampling", "generation", "fid", "profile"}
    | {"ema.snapshots"}
    | {"training.steps", "training.microbatch_size", "training.tokens_per_microbatch"}
    # Those that have begun are compared (`recovery.run_identity.check_stages`).
    | {"training.stages"}
    | {"training.deterministic", "training.gc_every"}
    | {"precision.attention"}
    # Like [faults], these decide when a step is skipped. The loss scale itself is saved.
    | {"precision.loss_scale", "precision.loss_scale_init", "precision.loss_scale_min"}
    | {"precision.loss_scale_window", "precision.loss_scale_hysteresis"}
    # The numbers behind a size are compared instead.
    | {"model.size"}
    # The dataset is compared by its digest; its path and how it is read may change. The digest
    # of several covers their repeats, weights and dropout.
    | {"data.name", "data.path", "data.paths", "data.num_workers", "data.workers", "data.verify"}
    | {"data.datasets"}
    | {"data.tokenizer", "text.encoder"}
    # `ValidationConfig.num_held_out` is compared instead.
    | {"validation.every", "validation.samples", "validation.path"}
)
"""Sections and keys that may change on resume, because the mathematics does not depend on them."""
