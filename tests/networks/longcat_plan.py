"""The tensor-parallel plan of the third network."""

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from titan_dit.parallel.tensor import (
    ModulationColwise,
    Replicated,
    ShardedNorm,
    TensorPlan,
    TokenFirst,
)


def plan(sequence_parallel):
    tokens = Shard(0) if sequence_parallel else Replicate()
    shard = Shard(1) if sequence_parallel else None

    def on_tokens(style):
        return TokenFirst(style) if sequence_parallel else style

    def columns():
        return on_tokens(ColwiseParallel(input_layouts=tokens))

    def rows():
        return on_tokens(RowwiseParallel(output_layouts=tokens))

    attention = {
        "modulation": ModulationColwise(sequence_parallel),
        "attn.qkv": columns(),
        "attn.q_norm": ShardedNorm(),
        "attn.k_norm": ShardedNorm(),
        "attn.out": rows(),
    }
    half = attention | {"mlp.up": columns(), "mlp.down": rows()}
    halves = {f"{name}.{k}": style for name in ("image", "text") for k, style in half.items()}
    outer = dict.fromkeys(("timestep.up", "timestep.down"), Replicated())
    return TensorPlan(
        stream=(shard, shard, Replicate()),
        token_first=sequence_parallel,
        embed={"patch": on_tokens(Replicated()), "text": on_tokens(Replicated()), **outer},
        block={},
        kinds={"double": halves, "single": attention | {"up": columns(), "down": rows()}},
        head={"modulation": Replicated(), "out": on_tokens(Replicated())},
    )
