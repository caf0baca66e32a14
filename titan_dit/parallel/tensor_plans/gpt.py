"""The tensor-parallel plan of GPT (Megatron's, arXiv:1909.08053 and arXiv:2205.05198).

Attention is sharded by heads, the MLP by its width, the vocabulary by rows. Norms are replicated.
"""

from __future__ import annotations

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from titan_dit.parallel.tensor import Replicated, ShardedNorm, TensorPlan


def plan(sequence_parallel: bool) -> TensorPlan:
    """Between blocks the tokens are sharded (sequence parallelism), or whole on every rank."""
    tokens = Shard(1) if sequence_parallel else Replicate()
    norm = ShardedNorm() if sequence_parallel else Replicated()
    return TensorPlan(
        stream=(Shard(1) if sequence_parallel else None,),
        embed={
            "token": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
            "position": Replicated(),
        },
        block={
            "attn_norm": norm,
            "attn.qkv": ColwiseParallel(input_layouts=tokens),
            "attn.out": RowwiseParallel(output_layouts=tokens),
            "mlp_norm": norm,
            "mlp.up": ColwiseParallel(input_layouts=tokens),
            "mlp.down": RowwiseParallel(output_layouts=tokens),
        },
        head={"norm": Replicated(), "out": ColwiseParallel(input_layouts=Replicate())},
    )
