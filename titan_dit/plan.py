"""The plan of a run: everything that follows from the config and the world size.

checks/ decides if it can run. Making a plan only checks that [model] fits [objective].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from titan_dit.config import catalog
from titan_dit.config.job import JobConfig
from titan_dit.config.layout import (
    ActivationCheckpointConfig,
    CompileConfig,
    OffloadConfig,
    ParallelConfig,
    PipelineConfig,
    PrecisionConfig,
)
from titan_dit.config.parameter_groups import GroupConfig
from titan_dit.config.section import UserError, show
from titan_dit.config.training import NO_REPA, LoRAConfig, RepaConfig, TrainingConfig
from titan_dit.models import lora
from titan_dit.models.base import ModelSpec
from titan_dit.objectives.repa import with_alignment
from titan_dit.objectives.sections import NO_FROZEN, FrozenWork
from titan_dit.parallel.fsdp import DTYPES
from titan_dit.parallel.mesh import AxisSizes, solve
from titan_dit.parallel.tensor import TensorPlan, uncut
from titan_dit.pipeline.schedules import files
from titan_dit.pipeline.schedules.placement import (
    check_schedule,
    check_split,
    layers_of_stages,
    pipeline_order,
    rank_of_stage,
    split_layers,
    stages_of_rank,
    stages_per_rank,
)
from titan_dit.pipeline.schedules.schedule import Kind, Order, num_microbatches_of, schedule_of

if TYPE_CHECKING:
    from titan_dit.data.base import DataFacts
    from titan_dit.pipeline.runtimes import Runtime


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """Sizes, stages, microbatches and shapes; read by build, dry run, report and checks."""

    name: str
    seed: int
    initial_weights: Literal["auto", "counter", "generator"]
    """[job] initial_weights, never "auto"."""
    sizes: AxisSizes
    world_size: int
    resuming: bool
    """The run has started: it may resume on another number of ranks."""
    model_name: str
    spec: ModelSpec
    tensor_plan_function: Callable[[bool], TensorPlan] | None
    """(sequence_parallel) -> the tensor plan; None if the model has none."""
    global_batch_size: int
    wanted_microbatch_size: int | None
    """[training] microbatch_size, or the size from tokens_per_microbatch."""
    sized_by_tokens: bool
    """[training] tokens_per_step gives the global batch size."""
    parallel: ParallelConfig
    pipeline: PipelineConfig
    precision: PrecisionConfig
    activation_checkpoint: ActivationCheckpointConfig
    compile: CompileConfig
    offload: OffloadConfig
    lora: LoRAConfig
    repa: RepaConfig = NO_REPA
    frozen: FrozenWork = NO_FROZEN
    """The objective's frozen modules."""
    device: str = ""
    """The GPU that is planned for, as torch reports it; empty: the one of this process."""
    bucket: str = ""
    """Name of the bucket that the sizes are of; empty if all data has one shape."""
    buckets: tuple[RunPlan, ...] = ()
    """The same run's plans for each bucket of the data, one of which has this plan's sizes; empty
    if all data has one shape."""

    @property
    def each_bucket(self) -> tuple[RunPlan, ...]:
        """The plans of the data's buckets, in their order; this plan if all data has one shape."""
        return self.buckets or (self,)

    @property
    def samples_per_step(self) -> tuple[int, ...]:
        """Samples of a step of each bucket; () if all data has one shape."""
        return tuple(each.global_batch_size for each in self.buckets)

    @property
    def dtype(self) -> torch.dtype:
        """Format of activations and matmuls."""
        return DTYPES[self.precision.dtype]

    def trained(self, names: Iterable[str], groups: Sequence[GroupConfig]) -> set[str]:
        """The parameters that neither [optimizer] `groups` nor [lora] freeze."""
        return lora.trained(names, self.lora, groups)

    @property
    def tokens_per_rank(self) -> int:
        """Predicted tokens of a sample on one cp rank."""
        return self.spec.num_tokens // self.sizes.cp

    @property
    def attended_per_rank(self) -> int:
        """Tokens of a sample in the blocks' linears, on one cp rank."""
        return self.spec.num_attended_tokens // self.sizes.cp

    @property
    def tensor_plan(self) -> TensorPlan:
        """The tensor-parallel plan; without a plan function nothing is split."""
        if self.tensor_plan_function is None:
            return uncut(len(self.spec.stream))
        return self.tensor_plan_function(self.parallel.sequence_parallel)

    @property
    def samples_per_rank(self) -> int:
        """Samples per step of the data-parallel rank with the largest share."""
        return -(-self.global_batch_size // self.sizes.data)

    @property
    def whole_microbatches(self) -> int:
        """Microbatches for a rank's share; the last one may not be full."""
        size = self.wanted_microbatch_size or (1 if self.sizes.pp > 1 else self.samples_per_rank)
        return -(-self.samples_per_rank // size)

    @cached_property
    def num_microbatches(self) -> int:
        """Microbatches per rank: the fewest that hold its share and that the schedule accepts."""
        least, pp = self.whole_microbatches, self.sizes.pp
        if pp == 1:
            return least
        # This range has a multiple of pp; dualpipev supports any number from 2 pp on.
        enough = range(least, least + 2 * pp + 1)
        return next((number for number in enough if self.schedule_runs(number)), least)

    def schedule_runs(self, num_microbatches: int) -> bool:
        """True if the pipeline schedule supports this number of microbatches."""
        try:
            check_schedule(
                self.pipeline.schedule,
                num_ranks=self.sizes.pp,
                num_microbatches=num_microbatches,
                virtual_stages=self.pipeline.virtual_stages,
            )
        except UserError:
            return False
        return True

    @property
    def microbatch_size(self) -> int:
        """Samples per forward pass; below [training] microbatch_size if that avoids padding."""
        return -(-self.samples_per_rank // self.num_microbatches)

    @property
    def padded_samples_per_rank(self) -> int:
        """Samples of a data-parallel rank's batch: its share and padding to full microbatches."""
        return self.num_microbatches * self.microbatch_size

    @property
    def num_stages(self) -> int:
        """Pipeline stages of the whole model."""
        pipeline, pp = self.pipeline, self.sizes.pp
        if pp == 1:
            return 1
        return pp * stages_per_rank(pipeline.schedule, pipeline.virtual_stages)

    @property
    def splits_backward(self) -> bool:
        """True if the pipeline order computes some input and weight gradients separately."""
        if self.sizes.pp > 1 and (order := self.order_of_file):
            return any(a.kind is Kind.BACKWARD_INPUT for actions in order for a in actions)
        return self.sizes.pp > 1 and schedule_of(self.pipeline.schedule).splits_backward

    @property
    def what_splits(self) -> tuple[str, str]:
        """The [pipeline] key that makes `splits_backward` True, and keys that make it False."""
        pipeline, unsplit = self.pipeline, 'schedule = "interleaved_1f1b"'
        if self.order_of_file is None:
            return f"schedule={show(pipeline.schedule)}", unsplit
        if schedule_of(pipeline.schedule).splits_backward:
            return f"order={show(pipeline.order)}", f'order = "planned" with {unsplit}'
        return f"order={show(pipeline.order)}", 'order = "planned"'

    @property
    def decides_at_run_time(self) -> bool:
        """True for a run-time order: pipeline ranks run what has arrived."""
        return self.sizes.pp > 1 and self.pipeline.order == "run_time"

    @cached_property
    def order_file(self) -> files.OrderFile | None:
        """The content of [pipeline] order = FILE.csv; None without a file. Raises UserError."""
        if self.pipeline.order in ("planned", "run_time"):
            return None
        return files.read_order(Path(self.pipeline.order))

    @property
    def order_of_file(self) -> Order | None:
        """The order in [pipeline] order = FILE.csv; None without a file. Raises UserError."""
        return self.order_file.order if self.order_file else None

    @cached_property
    def runtime(self) -> Runtime:
        """The executor of the pipeline, and why. Raises UserError if [pipeline] runtime cannot."""
        # Lazy import: of torch.distributed.pipelining.
        from titan_dit.pipeline.runtimes import choose

        return choose(
            self.pipeline,
            self.order(self.num_microbatches),
            tuple(self.stage_ranks),
            self.order_file,
        )

    @property
    def stage_ranks(self) -> list[int]:
        """The pipeline rank of each stage."""
        stages, pp = range(self.num_stages), self.sizes.pp
        return [rank_of_stage(self.pipeline.schedule, stage, pp) for stage in stages]

    @cached_property
    def stage_layers(self) -> tuple[range, ...]:
        """The layers of each stage."""
        model_spec, split = self.spec, self.pipeline.split
        if self.num_stages == 1:
            return (range(model_spec.num_layers),)
        if split:
            return layers_of_stages(check_split(split, model_spec.num_layers, self.num_stages))
        balanced = split_layers(
            model_spec.layer_costs,
            self.num_stages,
            embed=model_spec.embed_cost,
            head=model_spec.head_cost,
        )
        return layers_of_stages(balanced)

    def stages_of(self, pipeline_rank: int) -> tuple[int, ...]:
        """The stages of a pipeline rank."""
        pipeline, pp = self.pipeline, self.sizes.pp
        if pp == 1:
            return (0,)
        return stages_of_rank(pipeline.schedule, pipeline_rank, pp, pipeline.virtual_stages)

    def order(self, num_microbatches: int) -> Order:
        """The actions of every pipeline rank for `num_microbatches`.

        The order of a file (made for a training step) if it has as many microbatches, else the
        schedule's. A run-time order follows rules derived from the latter (`schedules.decider`).
        """
        if (order := self.order_of_file) and num_microbatches_of(order) == num_microbatches:
            return order
        return pipeline_order(
            self.pipeline.schedule,
            num_ranks=self.sizes.pp,
            num_microbatches=num_microbatches,
            virtual_stages=self.pipeline.virtual_stages,
        )


def resolve(config: JobConfig, world_size: int, resuming: bool = False) -> RunPlan:
    """The plan of a run on `world_size` ranks; `resuming`: see `RunPlan`.

    With data in buckets this is the plan of the largest one, which [model] describes: see
    `with_buckets`.
    """
    sizes = solve(config.parallel, world_size, resuming)
    spec = config.objective.model_spec(config.model)
    if config.repa.block:
        spec = with_alignment(spec, config.repa, config.objective.token_grid(config.model))
    batch = config.training.samples_per_step(spec.num_tokens)
    return RunPlan(
        name=config.job.name,
        seed=config.job.seed,
        # Only `open_run` knows if the run has started. Until then it counts as new.
        initial_weights=config.job.settled().initial_weights,
        sizes=sizes,
        world_size=world_size,
        resuming=resuming,
        model_name=config.model.name,
        spec=spec,
        tensor_plan_function=catalog.tensor_plan(config.model, config.parallel.tensor_plan),
        global_batch_size=batch,
        wanted_microbatch_size=microbatch_size(
            config.training, spec, sizes, batch, resuming=resuming
        ),
        sized_by_tokens=config.training.tokens_per_step is not None,
        parallel=config.parallel,
        pipeline=config.pipeline,
        precision=config.precision,
        activation_checkpoint=config.activation_checkpoint,
        compile=config.compile,
        lora=config.lora,
        repa=config.repa,
        offload=config.offload,
        frozen=config.objective.frozen_work(config.model, config.text, config.data),
    )


def microbatch_size(
    training: TrainingConfig, spec: ModelSpec, sizes: AxisSizes, batch: int, *, resuming: bool
) -> int | None:
    """The microbatch size that [training] asks for, of `batch` samples per step; None if none."""
    if training.tokens_per_microbatch is None:
        return training.microbatch_size
    share = -(-batch // sizes.data)
    return training.samples_per_microbatch(spec.num_tokens, share, pads=resuming)


def with_buckets(plan: RunPlan, config: JobConfig, facts: DataFacts) -> RunPlan:
    """A plan with a plan for each bucket of the data.

    Raises UserError if the model has one size.
    """
    found = []
    models = config.objective.sized_models(config.model, facts)
    if models and config.repa.block:
        raise UserError(
            f"[repa] block={config.repa.block}: [data] holds {len(models)} buckets, and features "
            "are of pictures of one shape. Encode pictures of one size (--image-size), or leave "
            "[repa] out."
        )
    for name, model in models:
        spec = config.objective.model_spec(model)
        batch = config.training.samples_per_step(spec.num_tokens, name)
        size = microbatch_size(config.training, spec, plan.sizes, batch, resuming=plan.resuming)
        found.append(
            replace(
                plan,
                bucket=name,
                spec=spec,
                global_batch_size=batch,
                wanted_microbatch_size=size,
            )
        )
    return replace(plan, buckets=tuple(found))
