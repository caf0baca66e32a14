"""The tensor-parallel plan of DiT (Megatron's, arXiv:1909.08053 and arXiv:2205.05198, with adaLN).

Attention is sharded by heads, the MLP by its hidden width, the modulation (a third of all
parameters) by outputs. Everything outside the blocks is small and replicated.
"""

from __future__ import annotations

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from titan_dit.parallel.tensor import (
    ModulationColwise,
    Replicated,
    ShardedNorm,
    TensorPlan,
    TokenFirst,
)


def plan(sequence_parallel: bool) -> TensorPlan:
    """Between blocks the tokens are sharded (sequence parallelism), or whole on every rank."""
    tokens = Shard(0) if sequence_parallel else Replicate()

    def on_tokens(style: ParallelStyle) -> ParallelStyle:
        return TokenFirst(style) if sequence_parallel else style

    return TensorPlan(
        stream=(Shard(1) if sequence_parallel else None, Replicate()),
        token_first=sequence_parallel,
        embed={
            "patch": on_tokens(Replicated()),
            "timestep.up": Replicated(),
            "timestep.down": Replicated(),
            "label.table": Replicated(),
        },
        block={
            "modulation": ModulationColwise(sequence_parallel),
            "attn.qkv": on_tokens(ColwiseParallel(input_layouts=tokens)),
            "attn.q_norm": ShardedNorm(),
            "attn.k_norm": ShardedNorm(),
            "attn.out": on_tokens(RowwiseParallel(output_layouts=tokens)),
            "mlp.up": on_tokens(ColwiseParallel(input_layouts=tokens)),
            "mlp.down": on_tokens(RowwiseParallel(output_layouts=tokens)),
        },
        head={"modulation": Replicated(), "out": on_tokens(Replicated())},
    )
