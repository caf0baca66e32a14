"""Training adapters against training all weights: `python benchmarks/lora.py [--size S/2]`.

CPU time of the process in a step of the trainer, in turn, and the size of what a checkpoint holds:
weights, moments, averages. Random latents of 32 x 32, fp32.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from typing import Any

from report import finish
from torch import Tensor
from torch.utils._pytree import tree_leaves

from titan_dit.config import catalog, config_file
from titan_dit.ranks import process_group
from titan_dit.ranks.process_group import World
from titan_dit.trainer import Trainer

MIB = 2**20
WARM_UP = 2


def trainer_of(world: World, size: str, batch: int, lora: dict[str, Any]) -> Trainer:
    """A trainer of a DiT; its weights are those of a new run."""
    latents = {"latent_size": 32, "num_classes": 1000}
    tables: dict[str, Any] = {
        "model": {"name": "dit", "size": size, "in_channels": 4, **latents},
        "objective": {"name": "ddpm"},
        "data": {"name": "synthetic", "channels": 4, **latents},
        "training": {"steps": 1000, "global_batch_size": batch},
        "precision": {"dtype": "fp32"},
        "optimizer": {"lr": 1e-4},
        "checkpoint": {"every": 0, "init": "not loaded"},
        "metrics": {"tensorboard": False},
        "lora": lora,
    }
    return Trainer(config_file.build(tables, catalog.variant), world)


def measure(world: World, options: argparse.Namespace) -> list[dict[str, object]]:
    """A row for each way to train."""
    tables: dict[str, dict[str, Any]] = {"all weights": {}, "adapters": {"rank": options.rank}}
    given = world, options.size, options.batch
    trainers = {name: trainer_of(*given, table) for name, table in tables.items()}
    batches = {name: trainer.batches() for name, trainer in trainers.items()}
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    for _, (name, trainer) in itertools.product(range(WARM_UP + options.turns), trainers.items()):
        batch = next(batches[name])
        trainer.step += 1
        began = time.process_time()
        trainer.train_step(batch)
        seconds[name].append(time.process_time() - began)
    whole = seconds["all weights"][WARM_UP:]
    rows: list[dict[str, object]] = []
    for name, trainer in trainers.items():
        own = seconds[name][WARM_UP:]
        ratios = [mine / theirs for mine, theirs in zip(own, whole, strict=True)]
        held = [leaf for leaf in tree_leaves(trainer.tensors()) if isinstance(leaf, Tensor)]
        trained = sum(p.numel() for p in trainer.parameters.values() if p.requires_grad)
        rows.append(
            {
                "trained": name,
                "parameters": f"{trained:,}",
                "CPU s per step": f"{statistics.median(own):.2f}",
                "ratio": f"{statistics.median(ratios):.2f}",
                "checkpoint, MiB": f"{sum(tensor.nbytes for tensor in held) / MIB:.0f}",
            }
        )
    return rows


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="S/2")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--out")
    options = parser.parse_args()
    with process_group.start("cpu") as world:
        rows = measure(world, options)
    finish(f"DiT-{options.size} batch {options.batch}, rank {options.rank}", rows, options.out)


if __name__ == "__main__":
    main()
