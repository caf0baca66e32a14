"""The tensor-parallel plan of the text-to-image DiT (that of DiT, tensor_plans/dit.py).

Attention is sharded by heads, the MLP by its width. The modulation is computed once, outside the
blocks, and replicated there with all else that is small; a block's table is replicated, too.
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


def plan(sequence_parallel: bool) -> TensorPlan:
    """Between blocks the tokens are sharded (sequence parallelism), or whole on every rank.

    Those of the caption and those of the picture are sharded apart: a rank holds a share of each.
    """
    tokens = Shard(0) if sequence_parallel else Replicate()
    shard = Shard(1) if sequence_parallel else None

    def on_tokens(style: ParallelStyle) -> ParallelStyle:
        return TokenFirst(style) if sequence_parallel else style

    return TensorPlan(
        stream=(shard, shard, Replicate()),
        token_first=sequence_parallel,
        embed={
            "patch": on_tokens(Replicated()),
            "text": Replicated(),
            "timestep.up": Replicated(),
            "timestep.down": Replicated(),
            "modulation": Replicated(),
        },
        block={
            "modulation": ModulationReplicated(sequence_parallel),
            "attn.qkv": on_tokens(ColwiseParallel(input_layouts=tokens)),
            "attn.q_norm": ShardedNorm(),
            "attn.k_norm": ShardedNorm(),
            "attn.out": on_tokens(RowwiseParallel(output_layouts=tokens)),
            "mlp.up": on_tokens(ColwiseParallel(input_layouts=tokens)),
            "mlp.down": on_tokens(RowwiseParallel(output_layouts=tokens)),
        },
        head={"out": on_tokens(Replicated())},
    )
