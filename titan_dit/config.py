"""The sections of a run's configuration and the keys they hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

from titan_dit.section import (
    Bound,
    Count,
    Decay,
    Fraction,
    NonNegative,
    Positive,
    Section,
    UserError,
    Whole,
    show,
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
class ParallelConfig(Section):
    """Ranks per mesh axis; their product must equal the number of ranks started."""

    section = "parallel"

    dp_replicate: Count = 1
    """Data-parallel replicas of the (sharded) model: HSDP when above 1."""
    dp_shard: Annotated[int, Bound(least=-1)] = -1
    """Ranks that share one copy of the parameters (FSDP2); -1 takes the remaining ranks."""
    tp: Count = 1
    """Tensor-parallel ranks: heads and MLP of every block are cut over them."""
    cp: Count = 1
    """Context-parallel ranks: every sample's tokens are sliced over them."""
    cp_method: Literal["ring", "ulysses"] = "ring"
    """How attention reaches the other slices: keys and values travel round (arXiv:2310.01889), or
    heads are exchanged for tokens (arXiv:2309.14509)."""
    pp: Count = 1
    """Pipeline-parallel ranks: the layers are cut into stages, see [pipeline]."""
    sequence_parallel: bool = True
    """With tp above 1: shard the tokens between blocks as well (arXiv:2205.05198)."""
    tensor_plan: str = "auto"
    """How tp cuts the model: "package.module:function"; auto takes the plan that comes with it."""
    async_tp: bool = False
    """Send the parts of tokens while others are multiplied; CUDA, compiled blocks, tp above 1."""
    reshard_after_forward: Literal["auto", "always", "never"] = "auto"
    """Free the gathered parameters between forward and backward: always, never, or (auto) as FSDP2
    does by itself, which is all but the outermost group; on one rank never. A pipeline keeps them
    for the step."""
    prefetch: Whole = 0
    """Blocks to all-gather ahead; 0 uses FSDP2's implicit prefetch, which gathers the next block as
    soon as the host comes to it."""


@dataclass(frozen=True, kw_only=True)
class PipelineConfig(Section):
    """What the ranks along pp do, and in which order. Without effect where pp is 1."""

    section = "pipeline"

    schedule: Literal[
        "gpipe",
        "1f1b",
        "interleaved_1f1b",
        "interleaved_zero_bubble",
        "zbv_zero_bubble",
        "dualpipev",
    ] = "1f1b"
    """Order of forward and backward passes."""
    virtual_stages: Count = 1
    """Stages per rank, for the interleaved schedules; V schedules (zbv, dualpipev) hold two."""
    split: tuple[Count, ...] = ()
    """Layers of each stage; empty balances them, embed and head counted as cost."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Section):
    """How long, how many samples a step, and how a step is taken."""

    section = "training"

    steps: Count
    """Optimizer steps of the whole run."""
    global_batch_size: Count
    """Samples per step over all ranks = microbatch_size x data-parallel ranks x accumulation."""
    microbatch_size: Count | None = None
    """Samples of one forward pass on one rank; unset takes the rank's whole share, or 1 in a
    pipeline."""
    max_grad_norm: NonNegative = 1.0
    """Clip the gradient to this global L2 norm; 0 switches clipping off."""
    deterministic: bool = False
    """Only deterministic kernels: a rerun repeats every bit, at some cost on a GPU."""
    gc_every: Whole = 50
    """Steps between two runs of Python's garbage collector, on all ranks at once; 0 leaves it to
    Python, which runs it on every rank at another moment."""


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig(Section):
    """Number formats. Weights, optimizer, EMA and reductions stay in fp32 (with fp64, in fp64)."""

    section = "precision"

    dtype: Literal["fp64", "fp32", "bf16"] = "bf16"
    """Format of activations and matrix products. fp64 is for comparing layouts."""
    attention: Literal["auto", "flash", "flash3", "flash4", "cudnn", "efficient", "math"] = "auto"
    """Which kernel computes attention; auto leaves it to torch, but for few tokens in compiled bf16
    on a CPU. flash3 and flash4 need packages of their own. One that cannot run the model is refused
    before the first step."""
    float8: Literal[
        "off",
        "tensorwise",
        "rowwise",
        "rowwise_with_gw_hp",
        "te_delayed",
        "te_current",
        "te_mxfp8",
    ] = "off"
    """Format of the products of the blocks' linears: torchao's recipes, or Transformer Engine's
    (te_*, an extra). See docs/float8.md."""
    float8_layers: Literal["auto", "all"] = "auto"
    """auto takes the shapes that gain on this device, all every one that fits."""
    float8_emulate: bool = False
    """Round to float8 and multiply as before: for looking at the numbers on any device, slowly."""

    def __str__(self) -> str:
        """For the console: "bf16", or "bf16, float8 rowwise (emulated)"."""
        emulated = " (emulated)" if self.float8_emulate else ""
        return self.dtype + (f", float8 {self.float8}{emulated}" if self.float8 != "off" else "")


@dataclass(frozen=True, kw_only=True)
class CompileConfig(Section):
    """torch.compile."""

    section = "compile"

    enabled: bool = False
    """Compile each block once (one graph serves all blocks)."""
    ends: bool = False
    """With `enabled`, compile embed and head too: two graphs more before the first step ends."""
    cuda_graphs: bool = False
    """With `enabled`, replay what is compiled as CUDA graphs: for small models on one GPU, whose
    steps wait for the host. One microbatch a step."""


@dataclass(frozen=True, kw_only=True)
class RematConfig(Section):
    """What a block computes again in backward instead of keeping it: memory for time."""

    section = "remat"

    mode: Literal["none", "attention", "selective", "full"] = "none"
    """none keeps everything; attention computes it again from q, k and v; selective keeps matrix
    products and attention, but no norm, modulation or GELU; full keeps each block's input only."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section):
    """AdamW (arXiv:1711.05101)."""

    section = "optimizer"

    name: Literal["adamw"] = "adamw"
    lr: Positive = 1e-4
    """Learning rate after the warm-up."""
    betas: tuple[Decay, ...] = (0.9, 0.999)
    """Decay of the first and of the second moment."""
    eps: Positive = 1e-8
    weight_decay: NonNegative = 0.0
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

    warmup_steps: Whole = 0
    decay: Literal["cosine", "linear", "constant"] = "constant"
    min_lr_ratio: Fraction = 0.0
    """Learning rate at the last step, as a part of [optimizer] lr."""


@dataclass(frozen=True, kw_only=True)
class EMAConfig(Section):
    """Exponential moving averages of the weights, one per decay."""

    section = "ema"

    decays: tuple[Decay, ...] = (0.9999,)
    """Empty switches EMA off. The first one is used for previews and sampling."""
    every: Count = 1
    """Steps between updates; the decay is raised to this power."""
    warmup: bool = True
    """Start with the decay min(decay, (1 + k) / (10 + k)) at update k."""

    def __post_init__(self) -> None:
        """Each decay once: it names the average."""
        super().__post_init__()
        if len(set(self.decays)) != len(self.decays):
            raise UserError(f"[ema] decays={show(self.decays)} names one decay twice.")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section):
    """When to save, what to keep, where to go on from."""

    section = "checkpoint"

    every: Whole = 1000
    """Steps between checkpoints; the last step is saved too. 0 saves nothing."""
    keep: Whole = 3
    """Newest checkpoints to keep; 0 keeps all."""
    keep_every: Whole = 0
    """Keep those of every so many steps for good, beside the newest; 0 keeps none of them."""
    async_save: bool = True
    """Copy the state and write it in the background; the step waits for the copy only, which takes
    as much host memory as the rank's state."""
    max_failures: Whole = 3
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

    max_consecutive_bad_steps: Whole = 100
    """After this many skipped steps in a row go back to the last good checkpoint and leave their
    data out; 0 never does."""
    max_rollbacks: Whole = 3
    """Stop when the run would go back once more without having come any further; 0 stops at once,
    without going back."""
    spike_ratio: NonNegative = 0.0
    """Skip a step whose gradient norm (before clipping) is more than this many times its running
    average over the good steps (decay 0.99); 0 skips none for it."""
    spike_after: Count = 100
    """Good steps before the average is trusted."""
    log_samples: bool = False
    """Write the sample numbers of every step to RUN/samples-seen: proof that none was lost."""
    step_timeout_s: NonNegative = 300.0
    """Seconds without a step after which a rank writes its stacks to hangs/ and ends, so that the
    launcher starts the run again. Loading, saving, drawing and the first step have 1,800 or more.
    Keep it below NCCL's own 600. 0 never ends a run."""


@dataclass(frozen=True, kw_only=True)
class MetricsConfig(Section):
    """What is written while training."""

    section = "metrics"

    every: Whole = 10
    """Steps between lines of metrics.jsonl and of the console; 0 writes none."""
    tensorboard: bool = True
    wandb: bool = False
    """Needs the extra: pip install 'titan_dit[wandb]'."""


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(Section):
    """Pictures drawn during training."""

    section = "sampling"

    every: Whole = 0
    """Steps between previews; the last step is drawn too. 0 draws nothing."""
    num: Count = 40
    sampler: str = "auto"
    """heun or euler for rectified_flow, ddim or ddpm for ddpm; auto takes the first of them."""
    steps: Count = 25
    """Steps of the sampler."""
    eta: Fraction = 0.0
    """Noise that ddim adds on the way: 0 none, 1 as much as ddpm."""
    cfg_scale: NonNegative = 2.0
    """Classifier-free guidance: 1 is none."""
    cfg_channels: Count | None = None
    """Guide the first channels only (the original DiT's samples guide 3 of 4); unset guides all."""


@dataclass(frozen=True, kw_only=True)
class ValidationConfig(Section):
    """The loss on samples that are not trained on."""

    section = "validation"

    every: Whole = 0
    """Steps between validations; the last step is validated too. 0 validates never."""
    samples: Whole = 0
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
class ProfileConfig(Section):
    """Traces of a few steps, in RUN/profile: where their time went."""

    section = "profile"

    enabled: bool = False
    start: Count = 10
    """First profiled step, counted from 1 at every launch; the first ones compile and warm up."""
    steps: Count = 3
    """Steps that are profiled."""
    ranks: tuple[Whole, ...] = ()
    """Ranks that are profiled; empty is rank 0."""
    memory: bool = False
    """On a GPU also write every allocation with its stack, for torch's memory viewer."""


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
