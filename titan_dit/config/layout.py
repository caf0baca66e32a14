"""Mesh axes, pipeline, number formats, compilation, recomputation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from titan_dit.config.catalog import SCHEDULES
from titan_dit.config.section import Bound, NonNegativeInt, OneOf, PositiveInt, Section


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(Section):
    """Ranks per mesh axis; their product must equal the number of ranks started."""

    section = "parallel"

    dp_replicate: PositiveInt = 1
    """Data-parallel replicas of the (sharded) model: HSDP when above 1."""
    dp_shard: Annotated[int, Bound(least=-1)] = -1
    """Ranks that share one copy of the parameters (FSDP2); -1 takes the remaining ranks."""
    tp: PositiveInt = 1
    """Tensor-parallel ranks: heads and MLP of every block are cut over them."""
    cp: PositiveInt = 1
    """Context-parallel ranks: every sample's tokens are sliced over them."""
    cp_method: Literal["ring", "ulysses"] = "ring"
    """How attention reaches the other slices: keys and values travel round (arXiv:2310.01889), or
    heads are exchanged for tokens (arXiv:2309.14509)."""
    pp: PositiveInt = 1
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
    prefetch: NonNegativeInt = 0
    """Blocks to all-gather ahead; 0 uses FSDP2's implicit prefetch, which gathers the next block as
    soon as the host comes to it."""


@dataclass(frozen=True, kw_only=True)
class PipelineConfig(Section):
    """What the ranks along pp do, and in which order. Without effect where pp is 1."""

    section = "pipeline"

    schedule: Annotated[str, OneOf(tuple(SCHEDULES))] = "1f1b"
    """Order of forward and backward passes; a schedule of your own is "package.module:NAME"."""
    virtual_stages: PositiveInt = 1
    """Stages per rank, for the interleaved schedules; V schedules (zbv, dualpipev) hold two."""
    split: tuple[PositiveInt, ...] = ()
    """Layers of each stage; empty balances them, embed and head counted as cost."""


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
