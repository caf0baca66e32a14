"""The tensor-parallel plan of Wan (as of the text-to-image DiT, tensor_plans/joint_dit.py).

Both attentions are sharded by heads, whose norms over all heads sum over the ranks; the MLP is
sharded by its width. The caption and the modulation are computed once, outside the blocks, and
replicated there with all else that is small: their gradients are all-reduced once.
"""

from __future__ import annotations

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel

from titan_dit.parallel.tensor import (
    ModulationReplicated,
    Replicated,
    SummedNorm,
    TensorPlan,
    attention_and_mlp,
    columns,
    norm_of_tokens,
    on_tokens,
    rows,
)

EMBEDDERS = "text.up", "text.down", "timestep.up", "timestep.down", "modulation"


def plan(sequence_parallel: bool) -> TensorPlan:
    """Between blocks the tokens are sharded (sequence parallelism), or whole on every rank."""
    return TensorPlan(
        stream=(Shard(1) if sequence_parallel else None, Replicate(), Replicate()),
        token_first=sequence_parallel,
        embed={
            "patch": on_tokens(Replicated(), sequence_parallel),
            "condition": on_tokens(Replicated(), sequence_parallel),
            **dict.fromkeys(EMBEDDERS, Replicated()),
        },
        block={
            "modulation": ModulationReplicated(sequence_parallel),
            **attention_and_mlp(sequence_parallel),
            "attn.norm": SummedNorm(),
            "cross_norm": norm_of_tokens(sequence_parallel),
            "cross.q": columns(sequence_parallel),
            "cross.kv": ColwiseParallel(input_layouts=Replicate()),
            "cross.norm": SummedNorm(),
            "cross.out": rows(sequence_parallel),
        },
        head={
            "modulation": Replicated(),
            "out": on_tokens(Replicated(), sequence_parallel),
        },
    )
