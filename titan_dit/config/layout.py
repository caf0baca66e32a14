"""Mesh axes, pipeline, number formats, compilation, recomputation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal, TypeAlias

from titan_dit.config.catalog import SCHEDULES
from titan_dit.config.section import (
    Bound,
    Dim,
    Few,
    OneOf,
    PositiveInt,
    Section,
    UserError,
    show,
)

MAX_LOSS_SCALE = 2.0**32
"""Maximum loss scale. Without it, a run whose gradients are all 0 would grow the scale for ever."""
LossScaleValue = Annotated[float, Bound(above=0, most=MAX_LOSS_SCALE)]


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(Section):
    """Ranks per mesh axis; their product must equal the world size."""

    section = "parallel"

    dp_replicate: Dim = 1
    """Replicas of the sharded model: HSDP if above 1."""
    dp_shard: Annotated[int, Bound(least=-1, most=10**7)] = -1
    """Ranks over which FSDP2 shards the parameters; -1 takes the remaining ranks."""
    tp: Few = 1
    """Tensor-parallel ranks: each block's heads and MLP width are split over them."""
    cp: Few = 1
    """Context-parallel ranks: each sample's tokens are split over them."""
    cp_method: Literal["ring", "ulysses"] = "ring"
    """Attention over the other ranks' tokens. ring passes keys and values around
    (arXiv:2310.01889), ulysses exchanges tokens for heads (arXiv:2309.14509)."""
    pp: Few = 1
    """Pipeline-parallel ranks: the layers are split into stages, see [pipeline]."""
    sequence_parallel: bool = True
    """Sequence parallelism: with tp above 1, shard the tokens between blocks (arXiv:2205.05198)."""
    tensor_plan: str = "auto"
    """Tensor-parallel plan, "package.module:function"; auto takes the model's own."""
    async_tp: bool = False
    """Overlap tp collectives with matmuls, part by part; needs CUDA, compile, and tp above 1."""
    reshard_after_forward: Literal["auto", "always", "never"] = "auto"
    """Free all-gathered parameters after forward and gather them again in backward. auto does so
    for the blocks if there is more than one shard, but not in a pipeline. One rank has no FSDP2."""
    blocks_per_fsdp_unit: PositiveInt | None = None
    """Blocks per FSDP unit, all-gathered and reduced together. Fewer need less memory, more need
    less time on the host. Unset: up to 4 small blocks, or 1 large one (docs/performance.md). No
    effect on one rank."""
    prefetch: PositiveInt | None = None
    """FSDP units to all-gather ahead. Unset: FSDP2's implicit prefetch of the next one."""


ScheduleName = Annotated[str, OneOf(tuple(SCHEDULES), class_prefix="schedule")]
"""A pipeline schedule, also in torch's spelling: "Interleaved1F1B"."""

TransportName: TypeAlias = Literal["auto", "process_group", "shared_memory", "nixl"]


@dataclass(frozen=True, kw_only=True)
class PipelineConfig(Section):
    """Pipeline schedule and stages. No effect if pp is 1."""

    section = "pipeline"

    schedule: ScheduleName = "1f1b"
    """The pipeline schedule, also in torch's spelling ("Interleaved1F1B"). One of your own is
    "package.module:NAME": a Schedule, or a class derived from one of torch's."""
    runtime: Literal["auto", "torch", "own"] = "auto"
    """Executor of a planned order: torch.distributed.pipelining, or titan_dit's own loop. auto
    takes torch's where it is as fast (docs/pipelines.md). The gradients are the same."""
    virtual_stages: Few = 1
    """Stages per rank of an interleaved schedule; V schedules always have two."""
    split: tuple[Few, ...] = ()
    """Layers per stage; empty balances the stages, with the costs of embed and head."""
    order: str = "planned"
    """planned runs the actions as the schedule lists them. run_time runs what has arrived. FILE.csv
    runs an order of `pipeline plan` or torch. All give the same gradients (docs/pipelines.md)."""
    memory: Annotated[float, Bound(least=1, most=1e6)] = 1.0
    """run_time: activations that a rank may hold, in units of the planned order's peak."""
    transport: TransportName = "auto"
    """run_time: how streams travel between ranks. auto takes shared memory within a host; between
    hosts nixl (RDMA, an extra) if it is installed, else the process group."""
    network: str | None = None
    """run_time with nixl: network interface, if hosts have several; or each host's own address."""


def as_planned(pipeline: PipelineConfig) -> PipelineConfig:
    """The same pipeline in the planned order; keys that only run_time uses have their defaults."""
    own = PipelineConfig()
    given = ("order", "memory", "transport", "network")
    return replace(pipeline, **{key: getattr(own, key) for key in given})


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig(Section):
    """Number formats. Optimizer, EMA and reductions are fp32 (fp64 if dtype is fp64)."""

    section = "precision"

    dtype: Literal["fp64", "fp32", "bf16", "fp16"] = "bf16"
    """Format of activations and matmuls. fp16 is for GPUs without bf16 (T4, V100) and has a loss
    scale. fp64 is for comparing layouts."""
    weights: Literal["fp32", "bf16"] = "fp32"
    """Format of the weights; fp64 if dtype is fp64. bf16: 2 bytes a parameter, no fp32 copy; what
    the optimizer's step makes of them is rounded at random, without bias."""
    loss_scale: LossScaleValue | None = None
    """fp16: constant loss scale. Unset: adapted to the gradients (docs/fp16.md)."""
    loss_scale_init: LossScaleValue = 4096.0
    """fp16: initial loss scale; a resumed run takes the checkpoint's."""
    loss_scale_window: PositiveInt = 1000
    """fp16: consecutive steps without an overflow after which the loss scale doubles."""
    loss_scale_hysteresis: PositiveInt = 2
    """fp16: overflows since the last doubling before the loss scale is halved (Megatron's
    --hysteresis). Each further overflow halves it again."""
    loss_scale_min: LossScaleValue = 1.0
    """fp16: minimum loss scale; there, a gradient norm that is not finite is a bad step."""
    attention: Literal["auto", "flash", "flash3", "flash4", "cudnn", "efficient", "math"] = "auto"
    """Attention kernel, refused at the start if it cannot run the model. auto chooses by device and
    shape, with or without a ring (docs/performance.md). flash3 and flash4 need extra packages."""
    float8: Literal[
        "off", "tensorwise", "rowwise", "rowwise_with_gw_hp", "te_delayed", "te_current", "te_mxfp8"
    ] = "off"
    """float8 recipe for the blocks' linears: torchao's, or Transformer Engine's (te_*, an extra).
    See docs/float8.md."""
    float8_layers: Literal["auto", "all"] = "auto"
    """auto converts the layers that get faster on this device; all converts all that fit."""
    float8_emulate: bool = False
    """Round to float8 but multiply in the original format: numerics on any device, slowly."""

    def __post_init__(self) -> None:
        """Raise UserError if dtypes do not fit, or loss_scale_init < loss_scale_min."""
        super().__post_init__()
        if self.weights == "bf16" and self.dtype not in ("bf16", "fp32"):
            raise UserError(
                f'[precision] weights="bf16" does not work with dtype={show(self.dtype)}. Set '
                'weights = "fp32", or dtype = "bf16".'
            )
        if self.weights == "bf16" and self.float8 != "off":
            raise UserError(
                f'[precision] weights="bf16" does not work with float8={show(self.float8)}, which '
                'scales fp32 weights. Set weights = "fp32" or float8 = "off".'
            )
        if self.loss_scale_init < self.loss_scale_min:
            raise UserError(
                f"[precision] loss_scale_init={show(self.loss_scale_init)} is below loss_scale_min="
                f"{show(self.loss_scale_min)}. Raise the first, or lower the second."
            )

    def __str__(self) -> str:
        """Console text: "bf16", or "bf16, float8 rowwise (emulated)"."""
        emulated = " (emulated)" if self.float8_emulate else ""
        weights = ", weights bf16" if self.weights == "bf16" else ""
        float8 = f", float8 {self.float8}{emulated}" if self.float8 != "off" else ""
        return self.dtype + weights + float8


@dataclass(frozen=True, kw_only=True)
class CompileConfig(Section):
    """torch.compile."""

    section = "compile"

    enabled: bool = False
    """Compile the blocks; they share one graph."""
    ends: bool = False
    """Compile embed and head, too: two more graphs. Needs `enabled`."""
    shapes: Literal["auto", "dynamic", "each"] = "auto"
    """Graphs of data in buckets. dynamic: one of the first bucket and one of all other shapes.
    each: one of every bucket, a compilation each. auto: each with tp, else dynamic."""
    objective: bool = True
    """Compile the objective's `prepare` and its loss in training. Needs `enabled`."""
    cuda_graphs: bool = False
    """CUDA graphs, with `enabled`: for small, host-bound models on one GPU with one microbatch."""


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointConfig(Section):
    """Activation recomputation in backward: less memory, more time. See docs/remat.md."""

    section = "activation_checkpoint"

    mode: Literal["none", "attention", "selective", "full"] = "none"
    """none saves all activations. attention recomputes attention from q, k and v. selective saves
    the outputs of matmuls and attention. full saves only each block's input."""


@dataclass(frozen=True, kw_only=True)
class OffloadConfig(Section):
    """Host memory in place of the device's: more room, at the speed of the link. docs/memory.md."""

    section = "offload"

    parameters: bool = False
    """Hold this rank's shards of weights, gradients, optimizer state and EMA on the host, which
    takes the optimizer's steps; FSDP2's CPUOffloadPolicy."""
    activations: bool = False
    """Copy what blocks save for backward to the host, and back block by block."""
    ahead: Annotated[int, Bound(least=1, most=64)] = 1
    """Blocks whose activations are copied back before their turn. One more is on the device."""
