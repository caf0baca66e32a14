"""The tensor-parallel plan of Z-Image (as of DiT, tensor_plans/dit.py).

Attention is sharded by heads, the MLP by its width, a block's modulation by outputs. Norms are
replicated, as is everything outside the blocks.
"""

from __future__ import annotations

from torch.distributed.tensor import Replicate, Shard

from titan_dit.parallel.tensor import (
    ModulationColwise,
    Replicated,
    TensorPlan,
    attention_and_mlp,
    norm_of_tokens,
    on_tokens,
)

NORMS = ("attn_norm", "attn_out_norm", "mlp_norm", "mlp_out_norm")


def plan(sequence_parallel: bool) -> TensorPlan:
    """Between blocks the tokens are sharded (sequence parallelism), or whole on every rank.

    The caption's and the picture's tokens are sharded separately: a rank holds a share of each.
    """
    shard = Shard(1) if sequence_parallel else None
    norm = norm_of_tokens(sequence_parallel)
    unmodulated = {**dict.fromkeys(NORMS, norm), **attention_and_mlp(sequence_parallel)}
    return TensorPlan(
        stream=(shard, shard, Replicate()),
        token_first=sequence_parallel,
        embed={
            "patch": Replicated(),
            "text": Replicated(),
            "timestep.up": Replicated(),
            "timestep.down": Replicated(),
        },
        block={**unmodulated, "modulation": ModulationColwise(sequence_parallel)},
        kinds={"refine_text": unmodulated},
        head={"modulation": Replicated(), "out": on_tokens(Replicated(), sequence_parallel)},
    )
