"""The tensor-parallel plan of the text-to-image DiT (as of DiT, tensor_plans/dit.py).

Attention is sharded by heads, the MLP by its width. The modulation is computed once, outside the
blocks, and replicated there with all else that is small; a block's table is replicated, too.
"""

from __future__ import annotations

from torch.distributed.tensor import Replicate, Shard

from titan_dit.parallel.tensor import (
    ModulationReplicated,
    Replicated,
    TensorPlan,
    attention_and_mlp,
    on_tokens,
)


def plan(sequence_parallel: bool) -> TensorPlan:
    """Between blocks the tokens are sharded (sequence parallelism), or whole on every rank.

    The caption's and the picture's tokens are sharded separately: a rank holds a share of each.
    """
    shard = Shard(1) if sequence_parallel else None

    return TensorPlan(
        stream=(shard, shard, Replicate()),
        token_first=sequence_parallel,
        embed={
            "patch": on_tokens(Replicated(), sequence_parallel),
            "condition": on_tokens(Replicated(), sequence_parallel),
            "text": Replicated(),
            "timestep.up": Replicated(),
            "timestep.down": Replicated(),
            "modulation": Replicated(),
        },
        block={
            "modulation": ModulationReplicated(sequence_parallel),
            **attention_and_mlp(sequence_parallel),
        },
        head={"out": on_tokens(Replicated(), sequence_parallel)},
    )
