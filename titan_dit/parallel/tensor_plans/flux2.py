"""The tensor-parallel plan of FLUX.2 (that of the text-to-image DiT, tensor_plans/joint_dit.py).

Attention is sharded by heads, the MLPs by their width. The modulation is computed once, outside the
blocks, and replicated there with all else that is small.
"""

from __future__ import annotations

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from titan_dit.parallel.tensor import (
    ModulationReplicated,
    Replicated,
    ShardedNorm,
    TensorPlan,
    TokenFirst,
)

EMBEDDERS = (
    *("timestep.up", "timestep.down", "guidance.up", "guidance.down"),
    *("modulation.image", "modulation.text", "modulation.single", "modulation.head"),
)


def plan(sequence_parallel: bool) -> TensorPlan:
    """Between blocks the tokens are sharded (sequence parallelism), or whole on every rank.

    Those of the caption and those of the picture are sharded apart: a rank holds a share of each.
    """
    tokens = Shard(0) if sequence_parallel else Replicate()
    shard = Shard(1) if sequence_parallel else None

    def on_tokens(style: ParallelStyle) -> ParallelStyle:
        return TokenFirst(style) if sequence_parallel else style

    layers = {
        "modulation": ModulationReplicated(sequence_parallel),
        "attn.qkv": on_tokens(ColwiseParallel(input_layouts=tokens)),
        "attn.q_norm": ShardedNorm(),
        "attn.k_norm": ShardedNorm(),
        "attn.out": on_tokens(RowwiseParallel(output_layouts=tokens)),
        "mlp.up": on_tokens(ColwiseParallel(input_layouts=tokens)),
        "mlp.down": on_tokens(RowwiseParallel(output_layouts=tokens)),
    }
    halves = {
        f"{half}.{name}": style for half in ("image", "text") for name, style in layers.items()
    }
    return TensorPlan(
        stream=(shard, shard, Replicate()),
        token_first=sequence_parallel,
        embed={
            "patch": on_tokens(Replicated()),
            "text": on_tokens(Replicated()),
            **dict.fromkeys(EMBEDDERS, Replicated()),
        },
        block=layers,
        kinds={"double": halves},
        head={"out": on_tokens(Replicated())},
    )
