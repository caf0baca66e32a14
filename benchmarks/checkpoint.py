"""Time that a checkpoint blocks its training step: `python benchmarks/checkpoint.py`.

Each turn measures, in one process: a memory copy of the state's bytes (both buffers paged in), the
blocking part of an async save, and a sync save with fsync of every file. Ratios are medians over
turns. The state is that of a DiT with AdamW and one EMA: weights, two moments, the EMA and a step
count per parameter. Files go to a temporary folder under --folder.

`--planning 1024` simulates the planning of that many ranks instead (checkpoint_planning.py).
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from checkpoint_planning import simulate
from report import finish
from torch import Tensor

from titan_dit.checkpoint.run_checkpoints import Checkpoints
from titan_dit.checkpoint.staging import leaves
from titan_dit.config.operation import CheckpointConfig
from titan_dit.config.training import EMAConfig
from titan_dit.models.dit_config import DiTConfig
from titan_dit.optim.ema import EMA
from titan_dit.optim.optimizer import build_optimizer, optimizer_tensors
from titan_dit.optim.sections import AdamWConfig

MODELS = {
    "30 MiB": {"hidden_size": 128, "num_layers": 7, "num_heads": 2},
    "120 MiB": {"hidden_size": 192, "num_layers": 12, "num_heads": 3},
    "500 MiB": {"hidden_size": 384, "num_layers": 12, "num_heads": 6},
    "1 GiB": {"hidden_size": 512, "num_layers": 14, "num_heads": 8},
}


def state(name: str, device: torch.device) -> Callable[[], dict[str, Any]]:
    """The function that the trainer calls for the tensors of a run."""
    config = DiTConfig(
        patch_size=2, latent_size=32, in_channels=4, num_classes=1000, **MODELS[name]
    )
    parameters = dict(config.build(4).to(device).named_parameters())
    optimizer = build_optimizer(parameters, AdamWConfig(), config.spec())
    ema = EMA(parameters, EMAConfig())

    def tensors() -> dict[str, Any]:
        return {
            "model": {name: p.detach() for name, p in parameters.items()},
            "optimizer": optimizer_tensors(optimizer, parameters),
            "ema": ema.averages,
        }

    return tensors


def seconds(action: Callable[[], object], device: torch.device) -> float:
    """Seconds of an action, after the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def copy_of(size: int, device: torch.device) -> Callable[[], None]:
    """An action that copies `size` bytes to host memory."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")

    def copy() -> None:
        target.copy_(source)

    return copy


def measure(name: str, folder: Path, turns: int, device: torch.device) -> dict[str, Any]:
    """The row of one model's state."""
    tensors = state(name, device)
    shards: list[Tensor] = list(leaves(tensors()))
    size = sum(shard.nbytes for shard in shards)
    copy = copy_of(size, device)
    record = {"step": 0, "cursor": 0}
    async_saves, sync_saves = (
        Checkpoints(folder / kind, CheckpointConfig(async_save=kind == "async", keep=1))
        for kind in ("async", "sync")
    )
    copies, waits, writes, saves = [], [], [], []
    first = 0.0
    for turn in range(turns + 1):
        gc.collect()
        copies.append(seconds(copy, device))
        waits.append(seconds(lambda t=turn: async_saves.save(t, tensors(), record), device))
        writes.append(waits[-1] + seconds(async_saves.wait, device))
        saves.append(seconds(lambda t=turn: sync_saves.save(t, tensors(), record), device))
        lines = async_saves.poll() + sync_saves.poll()
        assert sum(line.startswith("saved") for line in lines) == 2, lines
        first = first or waits[0]
    waits, copies, saves, writes = waits[1:], copies[1:], saves[1:], writes[1:]

    def ratio(ours: list[float], others: list[float]) -> float:
        return statistics.median(a / b for a, b in zip(ours, others, strict=True))

    return {
        "state": f"{size / 2**20:,.0f} MiB",
        "tensors": len(shards),
        "one copy ms": f"{statistics.median(copies) * 1e3:.1f}",
        "async wait ms": f"{statistics.median(waits) * 1e3:.1f}",
        "wait / copy": f"{ratio(waits, copies):.2f}",
        "first wait ms": f"{first * 1e3:.0f}",
        "async until whole ms": f"{statistics.median(writes) * 1e3:,.0f}",
        "sync save ms": f"{statistics.median(saves) * 1e3:,.0f}",
        "wait / sync": f"{ratio(waits, saves):.1%}",
    }


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--states", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--folder", help="parent of the temporary folder; default: the system's")
    parser.add_argument("--planning", type=int, metavar="RANKS")
    parser.add_argument("--size", default="XL/2", help="model of --planning")
    parser.add_argument("--out")
    options = parser.parse_args()
    if options.planning:
        rows = simulate(options.size, options.planning)
        finish("checkpoint planning", rows, options.out)
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = []
    for name in options.states:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            rows.append(measure(name, Path(folder), options.turns, device))
    finish("checkpoint", rows, options.out, turns=options.turns)


if __name__ == "__main__":
    main()
