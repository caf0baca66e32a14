"""The tensor-parallel plan of FLUX.2 (as of the text-to-image DiT, tensor_plans/joint_dit.py).

Attention is sharded by heads, the MLPs by their width. The modulation is computed once, outside the
blocks, and replicated there with all else that is small.
"""

from __future__ import annotations

from torch.distributed.tensor import Replicate, Shard

from titan_dit.parallel.tensor import (
    ModulationReplicated,
    Replicated,
    TensorPlan,
    attention_and_mlp,
    attention_beside_mlp,
    on_tokens,
)

EMBEDDERS = (
    *("timestep.up", "timestep.down", "guidance.up", "guidance.down"),
    *("modulation.image", "modulation.text", "modulation.single", "modulation.head"),
)


def plan(sequence_parallel: bool) -> TensorPlan:
    """Between blocks the tokens are sharded (sequence parallelism), or whole on every rank.

    The caption's and the picture's tokens are sharded separately: a rank holds a share of each.
    """
    shard = Shard(1) if sequence_parallel else None

    modulation = {"modulation": ModulationReplicated(sequence_parallel)}
    layers = {**modulation, **attention_and_mlp(sequence_parallel)}
    halves = {
        f"{half}.{name}": style for half in ("image", "text") for name, style in layers.items()
    }
    return TensorPlan(
        stream=(shard, shard, Replicate()),
        token_first=sequence_parallel,
        embed={
            "patch": on_tokens(Replicated(), sequence_parallel),
            "condition": on_tokens(Replicated(), sequence_parallel),
            "text": on_tokens(Replicated(), sequence_parallel),
            **dict.fromkeys(EMBEDDERS, Replicated()),
        },
        block={**modulation, **attention_beside_mlp(sequence_parallel)},
        kinds={"double": halves},
        head={"out": on_tokens(Replicated(), sequence_parallel)},
    )
