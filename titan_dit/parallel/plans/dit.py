"""The tensor-parallel plan of DiT (Megatron's, arXiv:1909.08053 and arXiv:2205.05198, with adaLN).

Attention is sharded by heads, the MLP by its hidden width, the modulation (a third of all
parameters) by outputs. Everything outside the blocks is small and replicated.
"""

from __future__ import annotations

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel

from titan_dit.parallel.tensor import HeadNorm, ModulationColwise, Replicated, TensorPlan


def plan(sequence_parallel: bool) -> TensorPlan:
    """Between blocks the tokens are sharded (sequence parallelism), or whole on every rank."""
    tokens = Shard(1) if sequence_parallel else Replicate()
    gather = PrepareModuleInput(input_layouts=tokens, desired_input_layouts=Replicate())
    return TensorPlan(
        stream=(tokens if sequence_parallel else None, Replicate()),
        embed={
            "patch": Replicated(),
            "timestep.up": Replicated(),
            "timestep.down": Replicated(),
            "label.table": Replicated(),
        },
        block={
            "modulation": ModulationColwise(sequence_parallel),
            "attn": gather,
            "attn.qkv": ColwiseParallel(),
            "attn.q_norm": HeadNorm(),
            "attn.k_norm": HeadNorm(),
            "attn.out": RowwiseParallel(output_layouts=tokens),
            "mlp": gather,
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(output_layouts=tokens),
        },
        head={"modulation": Replicated(), "out": Replicated()},
    )
