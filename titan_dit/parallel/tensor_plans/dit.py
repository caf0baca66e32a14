"""The tensor-parallel plan of DiT (Megatron's, arXiv:1909.08053 and arXiv:2205.05198, with adaLN).

Attention is sharded by heads, the MLP by its hidden width, the modulation (a third of all
parameters) by outputs. Everything outside the blocks is small and replicated.
"""

from __future__ import annotations

from torch.distributed.tensor import Replicate, Shard

from titan_dit.parallel.tensor import (
    ModulationColwise,
    Replicated,
    TensorPlan,
    attention_and_mlp,
    on_tokens,
)


def plan(sequence_parallel: bool) -> TensorPlan:
    """Between blocks the tokens are sharded (sequence parallelism), or whole on every rank."""
    return TensorPlan(
        stream=(Shard(1) if sequence_parallel else None, Replicate()),
        token_first=sequence_parallel,
        embed={
            "patch": on_tokens(Replicated(), sequence_parallel),
            "condition": on_tokens(Replicated(), sequence_parallel),
            "timestep.up": Replicated(),
            "timestep.down": Replicated(),
            "label.table": Replicated(),
        },
        block={
            "modulation": ModulationColwise(sequence_parallel),
            **attention_and_mlp(sequence_parallel),
        },
        head={
            "modulation": Replicated(),
            "out": on_tokens(Replicated(), sequence_parallel),
        },
    )
