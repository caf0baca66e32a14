"""Tokens [n, b, d] against [b, n, d] in memory, under sequence parallelism.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/token_order.py
    torchrun --nproc-per-node 4 benchmarks/token_order.py --size XL/2 --latent 64 --batch 8

Every rank runs forward and backward of both in alternating steps, on GPUs or on CPUs with gloo. The
time is rank 0's: CPU time on a CPU, wall time on a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from ours import learning, loss_of, network, randomize, resident_batch
from report import finish
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel
from torch.utils._python_dispatch import TorchDispatchMode

from titan_dit.config.layout import (
    ActivationCheckpointConfig,
    CompileConfig,
    ParallelConfig,
    PrecisionConfig,
)
from titan_dit.diffusion.sections import RectifiedFlowConfig
from titan_dit.execution import LocalExecutor
from titan_dit.models.dit_config import DiTConfig
from titan_dit.optim.optimizer import shards_of
from titan_dit.parallel.apply import parallelize
from titan_dit.parallel.init import initialize
from titan_dit.parallel.mesh import AxisSizes, Mesh
from titan_dit.parallel.tensor import ModulationColwise, Replicated, ShardedNorm, TensorPlan
from titan_dit.parallel.tensor_plans.dit import plan
from titan_dit.ranks import process_group
from titan_dit.rng import SampleRNG


def samples_first() -> TensorPlan:
    """DiT's plan with tokens [b, n, d]: collectives along dim 1."""
    tokens = Shard(1)
    gather = PrepareModuleInput(input_layouts=tokens, desired_input_layouts=Replicate())
    embed = ("patch", "timestep.up", "timestep.down", "label.table")
    return TensorPlan(
        stream=(tokens, Replicate()),
        embed={name: Replicated() for name in embed},
        block={
            "modulation": ModulationColwise(sequence_parallel=True),
            "attn": gather,
            "attn.qkv": ColwiseParallel(),
            "attn.q_norm": ShardedNorm(),
            "attn.k_norm": ShardedNorm(),
            "attn.out": RowwiseParallel(output_layouts=tokens),
            "mlp": gather,
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(output_layouts=tokens),
        },
        head={"modulation": Replicated(), "out": Replicated()},
    )


WAYS = {"[b, n, d]": samples_first, "[n, b, d]": lambda: plan(sequence_parallel=True)}


class Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls and bytes of copies with at least as many elements as a rank's tokens."""

    def __init__(self, least: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.least, self.calls, self.bytes = least, 0, 0

    def __torch_dispatch__(
        self, op: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Count an operator that copies."""
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # A DTensor dispatches its local tensor here.
        out = op(*args, **(kwargs or {}))
        if op.__name__.split(".")[0] in ("clone", "cat", "stack") and out.numel() >= self.least:
            self.calls, self.bytes = self.calls + 1, self.bytes + out.nbytes
        return out


def step_of(way: str, options: argparse.Namespace, mesh: Mesh) -> Callable[[], Tensor]:
    """Forward and backward of a network with this order of tokens."""
    device = torch.device(mesh.whole.device_type)
    config = DiTConfig(
        size=options.size, latent_size=options.latent, in_channels=4, num_classes=1000
    )
    model, objective = (
        network(config, RectifiedFlowConfig()),
        learning(config, RectifiedFlowConfig()),
    )
    precision = PrecisionConfig(dtype=options.dtype)
    compilation = CompileConfig(enabled=options.compile)
    parallel = ParallelConfig(tp=mesh.sizes.tp)
    parallelize(
        model, mesh, WAYS[way](), parallel, precision, ActivationCheckpointConfig(), compilation
    )
    initialize(model, model.initializers(), 0, device)
    randomize([shard.detach() for shard in shards_of(model.parameters())])
    executor = LocalExecutor(model, loss_of(objective), None)
    batch = resident_batch(config, options.batch, device)
    prepared = objective.prepare(batch, SampleRNG(0, batch.sample_numbers))
    return lambda: executor.step(prepared)


def ms_of(step: Callable[[], Tensor]) -> float:
    """Milliseconds of a step: CPU time, or wall time on a GPU."""
    clock = time.process_time
    if torch.cuda.is_available():
        clock = time.perf_counter
        torch.cuda.synchronize()
    start = clock()
    step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return 1e3 * (clock() - start)


def main() -> None:
    """Measure on all ranks; rank 0 reports."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="S/2")
    parser.add_argument("--latent", type=int, default=32)
    parser.add_argument("--batch", type=int, default=8, help="samples of a microbatch")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--out", help="JSON")
    options = parser.parse_args()
    with process_group.start() as world:
        mesh = Mesh(AxisSizes(tp=world.size), world.device.type)
        steps = {way: step_of(way, options, mesh) for way in WAYS}
        config = DiTConfig(
            size=options.size, latent_size=options.latent, in_channels=4, num_classes=1000
        )
        least = options.batch * config.token_shape[0] * config.shape[0] // world.size
        rows, found = [], {way: list[float]() for way in WAYS}
        for step in steps.values():
            step()
        for _ in range(options.times):
            for way, step in steps.items():
                found[way].append(ms_of(step))
        first = statistics.median(found["[b, n, d]"])
        for way, step in steps.items():
            with Copies(least) as copies:
                step()
            took = statistics.median(found[way])
            rows.append(
                {
                    "tokens": way,
                    "ms": f"{took:.1f}",
                    "ratio": f"{took / first:.3f}",
                    "copies": str(copies.calls),
                    "MB copied": f"{copies.bytes / 1e6:.1f}",
                }
            )
        if world.is_main:
            name = f"token_order {options.size} tp {world.size} batch {options.batch}"
            finish(f"{name} {options.dtype}", rows, options.out, rounds=found)


if __name__ == "__main__":
    main()
