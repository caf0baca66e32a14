"""The layouts that the planner may choose: all layouts of a config on a number of GPUs.

A layout is one value for each key of `KEYS`. Model, objective, optimizer and global batch stay
fixed. The checks of a start (titan_dit.checks) decide which layouts can run; each check runs once
for the values that it reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from titan_dit.checks import formats, layout
from titan_dit.config.catalog import SCHEDULES
from titan_dit.config.job import JobConfig
from titan_dit.config.layout import (
    ActivationCheckpointConfig,
    ParallelConfig,
    PipelineConfig,
    PrecisionConfig,
    as_planned,
)
from titan_dit.config.section import UserError
from titan_dit.dry_run.simpler import word
from titan_dit.opening import bucket_facts, plan_run
from titan_dit.parallel.mesh import AXES, FILL, AxisSizes, axes
from titan_dit.parallel.tensor import TensorPlan
from titan_dit.pipeline.schedules.schedule import schedule_of
from titan_dit.plan import RunPlan, resolve, with_buckets
from titan_dit.planner.hardware import Device

MIN_TOKENS = 256
"""Minimum tokens of a sample on a cp rank: fewer do not fill a matrix product."""
MAX_TOKENS = 2**16
"""Maximum tokens of a microbatch on a rank: kernels are full long before."""
VIRTUAL_STAGES = (2, 4, 8)
"""Stages per rank that are tried with interleaved schedules, besides the config's."""
MODES = ("none", "attention", "selective", "full")
"""[activation_checkpoint] modes; each recomputes more than the one before."""
RECIPE = "tensorwise"
"""The float8 recipe that is tried besides the config's: it reads memory least often."""


DATA_AXES = axes("samples")


class Candidate(NamedTuple):
    """A layout: one value for each key of `KEYS`. The first are the axes, in mesh order."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    cp_method: str
    sequence_parallel: bool
    reshard_after_forward: str
    schedule: str
    virtual_stages: int
    microbatch_size: int
    mode: str
    float8: str

    @property
    def sizes(self) -> AxisSizes:
        """The mesh of this layout."""
        return AxisSizes(**dict(zip(AXES, self.per_axis, strict=True)))

    @property
    def per_axis(self) -> tuple[int, ...]:
        """Ranks of each axis, in mesh order."""
        found: tuple[Any, ...] = self[: len(AXES)]
        return found

    @property
    def num_data_ranks(self) -> int:
        """Ranks that read different samples."""
        return math.prod(getattr(self, axis) for axis in DATA_AXES)

    @property
    def num_axes(self) -> int:
        """Number of mesh axes above 1."""
        return sum(size > 1 for size in self.per_axis)


PARALLEL_KEYS = (*AXES, "cp_method", "sequence_parallel", "reshard_after_forward")
SECTIONS = {
    "parallel": PARALLEL_KEYS,
    "pipeline": ("schedule", "virtual_stages"),
    "training": ("microbatch_size",),
    "activation_checkpoint": ("mode",),
    "precision": ("float8",),
}
KEYS = tuple(f"{section}.{key}" for section, keys in SECTIONS.items() for key in keys)
"""The keys that the planner chooses, in the order of `Candidate`."""
PARALLEL = frozenset(f"parallel.{key}" for key in SECTIONS["parallel"])


class Space:
    """The layouts of `config` on `gpus` ranks of `device`."""

    def __init__(
        self, config: JobConfig, gpus: int, device: Device, fixed: Collection[str] = ()
    ) -> None:
        """`fixed`: names of `KEYS` that keep the config's value."""
        self.config, self.gpus, self.device = config, gpus, device
        self.fixed = frozenset(fixed)
        pipeline = as_planned(config.pipeline)
        # The layers of a stage and the order of a file belong to one number of stages.
        self.pipeline = replace(pipeline, split=()) if "pipeline.split" not in fixed else pipeline
        base = resolve(replace(config, parallel=all_on_dp_shard(config.parallel)), gpus)
        base = replace(base, device=device.torch_name)
        facts = bucket_facts(config)
        self.base = with_buckets(base, config, facts) if facts else base
        self.unit = math.gcd(*(each.global_batch_size for each in self.base.each_bucket))
        """Divisor of the samples of every step; microbatches must divide a rank's share of it."""
        self.tensor_plans: dict[bool, TensorPlan] = {}
        self._parallel: dict[tuple[Any, ...], ParallelConfig] = {}
        self._sections: dict[tuple[str, ...] | tuple[str, int], Any] = {}
        self._verdicts: dict[tuple[Any, ...], bool] = {}
        self.refusal: str | None = None
        """The error of the last check that refused a layout."""

    def __iter__(self) -> Iterator[Candidate]:
        """Every layout that the checks accept, grouped by tensor and context split."""
        for start in self._meshes():
            for staged in self._pipelines(start):
                yield from self._formats(staged)

    def plan(self, candidate: Candidate, base: RunPlan | None = None) -> RunPlan:
        """The plan of a run with this layout; `base`: of one of the buckets, or the largest."""
        return replace(
            base or self.base,
            buckets=(),
            sizes=candidate.sizes,
            parallel=self.parallel_of(candidate),
            pipeline=self.pipeline_of(candidate),
            wanted_microbatch_size=candidate.microbatch_size,
            activation_checkpoint=self.remat_of(candidate),
            precision=self.precision_of(candidate),
        )

    def config_of(self, candidate: Candidate) -> JobConfig:
        """The config of a run with this layout."""
        training = self.config.training.with_microbatches(candidate.microbatch_size)
        return replace(
            self.config,
            parallel=self.parallel_of(candidate),
            pipeline=self.pipeline_of(candidate),
            training=training,
            activation_checkpoint=self.remat_of(candidate),
            precision=self.precision_of(candidate),
        )

    def check(self, candidate: Candidate) -> None:
        """Run the checks of a start. Raises UserError."""
        config = self.config_of(candidate)
        plan_run(config, self.gpus)

    def why_empty(self) -> str | None:
        """The error of the checks for the fixed values alone; without one, the last refusal."""
        config = self.config
        own = {key.partition(".")[2]: self.fixed_value(key) for key in self.fixed & PARALLEL}
        size = self.fixed_value("training.microbatch_size")
        training = config.training.with_microbatches(size)
        simple = replace(
            config, parallel=replace(all_on_dp_shard(config.parallel), **own), training=training
        )
        try:
            plan_run(simple, self.gpus)
        except UserError as error:
            return str(error)
        return self.refusal

    def flags(self, candidate: Candidate) -> str:
        """The command-line keys that turn the config into this layout."""
        old, new = self.config, self.config_of(candidate)
        words = []
        for section in SECTIONS:
            before, after = vars(getattr(old, section)), vars(getattr(new, section))
            for key in (key for key in after if before[key] != after[key]):
                words.append(f"--{section}.{key} {word(after[key]) if after[key] != () else '[]'}")
        return " ".join(words)

    def parallel_of(self, candidate: Candidate) -> ParallelConfig:
        """[parallel] of a layout."""
        key = candidate[: len(PARALLEL_KEYS)]
        if key not in self._parallel:
            given: dict[str, Any] = dict(zip(SECTIONS["parallel"], key, strict=True))
            if candidate.tp == 1:
                given["async_tp"] = False
            self._parallel[key] = replace(self.config.parallel, **given)
        return self._parallel[key]

    def pipeline_of(self, candidate: Candidate) -> PipelineConfig:
        """[pipeline] of a layout."""
        found: PipelineConfig = self._section(
            (candidate.schedule, candidate.virtual_stages),
            lambda: replace(
                self.pipeline,
                schedule=candidate.schedule,
                virtual_stages=candidate.virtual_stages,
            ),
        )
        return found

    def remat_of(self, candidate: Candidate) -> ActivationCheckpointConfig:
        """[activation_checkpoint] of a layout."""
        mode: Any = candidate.mode
        own = self.config.activation_checkpoint
        found: ActivationCheckpointConfig = self._section(
            ("activation_checkpoint", mode), lambda: replace(own, mode=mode)
        )
        return found

    def precision_of(self, candidate: Candidate) -> PrecisionConfig:
        """[precision] of a layout."""
        recipe: Any = candidate.float8
        own = self.config.precision
        made = self._section(("float8", recipe), lambda: replace(own, float8=recipe))
        found: PrecisionConfig = made
        return found

    def _section(self, key: Any, made: Callable[[], Any]) -> Any:
        # Building a section checks its keys, which takes longer than a bound on a step's time.
        if key not in self._sections:
            self._sections[key] = made()
        return self._sections[key]

    def fixed_value(self, key: str) -> Any:
        """The config's value of one of `KEYS` if it is fixed, else None."""
        section, _, name = key.partition(".")
        return getattr(getattr(self.config, section), name) if key in self.fixed else None

    def _options(self, key: str, free: Collection[Any]) -> Collection[Any]:
        """The values of a key to try."""
        return free if key not in self.fixed else (self.fixed_value(key),)

    def _sizes(self, axis: str, ranks: int, most: int) -> list[int]:
        """The divisors of `ranks` to try for an axis, at most `most` unless it is fixed."""
        own = self.fixed_value(f"parallel.{axis}")
        if own in (None, -1):
            return [size for size in range(1, min(ranks, most) + 1) if ranks % size == 0]
        return [own] if ranks % own == 0 else []

    def _accepts(self, check: Callable[[RunPlan], None], candidate: Candidate, *read: Any) -> bool:
        """True if a check accepts a layout; `read`: the values that its answer depends on."""
        key = (check.__name__, *read)
        if key not in self._verdicts:
            try:
                for base in self.base.each_bucket:
                    check(self.plan(candidate, base))
                self._verdicts[key] = True
            except UserError as error:
                self._verdicts[key], self.refusal = False, str(error)
        return self._verdicts[key]

    def _meshes(self) -> Iterator[Candidate]:
        """Every mesh and split of tensors and tokens, without a pipeline's schedule."""
        spec, node = self.base.spec, self.device.gpus_per_node
        slices = max(1, spec.num_attended_tokens // MIN_TOKENS)
        for tp in self._sizes("tp", self.gpus, min(node, spec.num_heads)):
            if node % tp and self.gpus > node and "parallel.tp" not in self.fixed:
                continue  # Groups would leave their node.
            for cp in self._sizes("cp", self.gpus // tp, slices):
                for method in self._methods(cp):
                    starts = (self._start(tp, cp, method, each) for each in self._sequence(tp))
                    # As fast without sequence parallelism, but with more memory.
                    if start := next(filter(self._splits, starts), None):
                        yield from self._data(start)

    def _start(self, tp: int, cp: int, method: str, sequence: bool) -> Candidate:
        """A split of tensors and tokens; all other ranks are shards."""
        return Candidate(
            **{
                **dict.fromkeys(AXES, 1),
                "dp_shard": self.gpus // tp // cp,
                "cp": cp,
                "tp": tp,
            },
            cp_method=method,
            sequence_parallel=sequence,
            reshard_after_forward="auto",
            schedule="1f1b",
            virtual_stages=1,
            microbatch_size=1,
            mode="none",
            float8="off",
        )

    def _methods(self, cp: int) -> Collection[str]:
        if cp == 1:
            return (self.config.parallel.cp_method,)
        return self._options("parallel.cp_method", ("ring", "ulysses"))

    def _sequence(self, tp: int) -> Collection[bool]:
        if tp == 1:
            return (self.config.parallel.sequence_parallel,)
        return self._options("parallel.sequence_parallel", (True, False))

    def _splits(self, start: Candidate) -> bool:
        """True if the model's heads, widths and tokens can be split so."""
        read = start.tp, start.cp, start.cp_method, start.sequence_parallel
        checks = (layout.check_tensor, layout.check_context, layout.check_tensor_specs)
        return all(self._accepts(check, start, *read) for check in checks)

    def _data(self, start: Candidate) -> Iterator[Candidate]:
        """The pipeline and data-parallel sizes of the remaining ranks."""
        ranks = self.gpus // start.tp // start.cp
        for pp in self._sizes("pp", ranks, self.base.spec.num_layers):
            left = ranks // pp
            for shard in self._sizes("dp_shard", left, left):
                if left // shard not in self._sizes("dp_replicate", left // shard, left):
                    continue
                mesh = start._replace(pp=pp, dp_shard=shard, dp_replicate=left // shard)
                if self._accepts(layout.check_batch, mesh, left):
                    yield mesh

    def _pipelines(self, mesh: Candidate) -> Iterator[Candidate]:
        """Schedules, stages per rank and microbatch sizes."""
        share = self.unit // mesh.num_data_ranks
        most = max(1, MAX_TOKENS * mesh.cp // self.base.spec.num_attended_tokens)
        free = [size for size in divisors(share) if size <= most]
        sizes = self._options("training.microbatch_size", free)
        for schedule, virtual in self._schedules(mesh.pp):
            for size in sizes:
                if size is None or share % size:
                    continue
                found = mesh._replace(
                    schedule=schedule, virtual_stages=virtual, microbatch_size=size
                )
                read = mesh.pp, schedule, virtual, share // size
                if mesh.pp == 1 or self._accepts(layout.check_pipeline, found, *read):
                    yield found

    def _schedules(self, pp: int) -> Iterator[tuple[str, int]]:
        """Schedules and stages per rank; without a pipeline the config's."""
        own = self.config.pipeline
        if pp == 1:
            yield own.schedule, own.virtual_stages
            return
        # These take as long as 1f1b and interleaved_1f1b, with the activations of all microbatches.
        names = dict.fromkeys((*SCHEDULES, own.schedule))
        for name in ("gpipe", "looped_bfs"):
            names.pop(name)
        for name in self._options("pipeline.schedule", names):
            several = schedule_of(name).interleaved
            free = sorted({*VIRTUAL_STAGES, max(2, own.virtual_stages)}) if several else (1,)
            for virtual in self._options("pipeline.virtual_stages", free):
                yield name, virtual

    def _formats(self, staged: Candidate) -> Iterator[Candidate]:
        """Recomputation, float8, and whether gathered parameters are kept after forward."""
        read = staged.pp > 1, staged.schedule, staged.tp, staged.cp, staged.sequence_parallel
        passes = self.base.global_batch_size // staged.num_data_ranks
        passes //= staged.microbatch_size
        for mode in self._options("activation_checkpoint.mode", MODES):
            for recipe in self._recipes():
                found = staged._replace(mode=mode, float8=recipe)
                own = (*read, passes > 1, mode, recipe)
                checks = (
                    *(formats.check_compile, formats.check_remat, formats.check_float8),
                    formats.check_offload,
                )
                if all(self._accepts(check, found, *own) for check in checks):
                    for reshard in self._reshards(staged):
                        yield found._replace(reshard_after_forward=reshard)

    def _recipes(self) -> Collection[str]:
        """[precision] float8: off, the config's own, and one more if the device has float8."""
        own, adapts = self.config.precision, self.config.lora.rank > 0
        if "precision.float8" in self.fixed or own.float8_emulate:
            return (own.float8,)
        has = "float8" in self.device.peak_tflops and own.dtype == "bf16" and not adapts
        return tuple(dict.fromkeys(("off", own.float8, RECIPE) if has else ("off",)))

    def _reshards(self, mesh: Candidate) -> Collection[str]:
        """Values of reshard_after_forward to try: one if parameters are kept in any case."""
        if mesh.pp > 1 or mesh.dp_shard * mesh.cp == 1:
            return self._options("parallel.reshard_after_forward", ("auto",))
        return self._options("parallel.reshard_after_forward", ("auto", "never"))


def all_on_dp_shard(parallel: ParallelConfig) -> ParallelConfig:
    """[parallel] with all ranks on dp_shard, whatever was given."""
    sizes = {**dict.fromkeys(AXES, 1), FILL: -1, "async_tp": False}
    return replace(parallel, **sizes)  # type: ignore[arg-type]


def divisors(number: int) -> list[int]:
    """All divisors, the smallest first."""
    return [size for size in range(1, number + 1) if number % size == 0]
