"""CPU time of the host in a training step: `python benchmarks/host_time.py [--compiled] ...`.

On a GPU the host must queue a step's kernels faster than the device runs them. Here a model with
the 28 layers and all parameters of XL, but 16 channels, takes the trainer's steps on a CPU with one
thread: its kernels cost next to nothing, what remains is the host's work.

`--against PATH` measures another checkout in turn with this one, each in a process of its own, and
`--set parallel.prefetch=1` changes keys of this one only. With `--ranks 8` it is rank 0 of 8 whose
collectives return at once, as in a dry run. `launches.py` counts kernel launches.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
WARM_UP = 4
"""Steps before the first that counts: they compile, and make AdamW's state."""
TABLES: dict[str, dict[str, Any]] = {
    "model": {
        "name": "dit",
        "hidden_size": 16,
        "num_layers": 28,
        "num_heads": 2,
        "patch_size": 2,
        "latent_size": 4,
        "in_channels": 4,
        "num_classes": 10,
    },
    "objective": {"name": "rectified_flow"},
    "data": {"name": "synthetic", "latent_size": 4, "channels": 4, "num_classes": 10},
    "training": {"steps": 10**6, "global_batch_size": 2},
    "checkpoint": {"every": 0},
    "metrics": {"tensorboard": False},
}
PARTS = {
    "prepare": ("built.prepare", "objective.prepare"),
    "forward and backward": ("executor.step",),
    "clip": ("trainer:clip_norm",),
    "guard": ("guard.check",),
    "optimizer": ("trainer:apply_gradients",),
    "EMA": ("ema.update",),
}
"""Part of a step -> where the trainer finds the function: an attribute of its own, or a name in its
module. The first that exists is taken: checkouts differ."""


class Parts:
    """Calls `around(part, function)` in place of each part of a trainer's step."""

    def __init__(self, trainer: Any, around: Callable[[str, Callable[..., Any]], Any]) -> None:
        module = sys.modules[type(trainer).__module__]
        for part, places in PARTS.items():
            for place in places:
                owner, name = place.replace(":", ".").split(".")
                holder = module if ":" in place else getattr(trainer, owner)
                function = getattr(holder, name, None)
                if function is not None:
                    # Frozen dataclasses, too.
                    put = setattr if ":" in place else object.__setattr__
                    put(holder, name, around(part, function))
                    break


def make_trainer(compiled: bool, ranks: int, changes: Sequence[str]) -> tuple[Any, Any]:
    """A trainer and its batches; the checkout is the first that Python finds."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from titan_dit.config import catalog, config_file
    from titan_dit.ranks import process_group
    from titan_dit.trainer import Trainer

    tables = {name: dict(table) for name, table in TABLES.items()}
    tables["compile"] = {"enabled": compiled}
    tables["training"]["global_batch_size"] *= ranks
    for change in changes:
        key, _, value = change.partition("=")
        section, _, name = key.partition(".")
        tables.setdefault(section, {})[name] = tomllib.loads(f"x = {value}")["x"]
    if ranks > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        world = process_group.World(0, ranks, torch.device("cpu"))
    else:
        world = process_group.start("cpu").__enter__()
    trainer = Trainer(config_file.build(tables, catalog.variant), world)
    return trainer, trainer.batches()


def serve(compiled: bool, ranks: int, changes: Sequence[str]) -> None:
    """For every line on stdin take a step; answer with the CPU ms of each part."""
    import torch

    torch.set_num_threads(1)
    trainer, batches = make_trainer(compiled, ranks, changes)
    spent: Counter[str] = Counter()

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time_ns()
            result = function(*args, **kwargs)
            spent[part] += time.process_time_ns() - start
            return result

        return call

    Parts(trainer, timed)
    for _ in sys.stdin:
        batch = next(batches)
        spent.clear()
        trainer.step += 1
        start = time.process_time_ns()
        trainer.train_step(batch)
        whole = time.process_time_ns() - start
        trainer.guard.unread.clear()
        ms = {part: spent[part] / 1e6 for part in PARTS}
        ms |= {"rest": (whole - sum(spent.values())) / 1e6, "step": whole / 1e6}
        print("ms", json.dumps(ms), flush=True)


class Contender:
    """A checkout's trainer in a process of its own."""

    def __init__(self, path: Path, arguments: Sequence[str]) -> None:
        environment = {**os.environ, "PYTHONPATH": str(path), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--serve", *arguments]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, env=environment, cwd=path
        )

    def step(self) -> dict[str, float]:
        """Take a step; the CPU ms of its parts."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("ms "):
                found: dict[str, float] = json.loads(line[3:])
                return found
        raise SystemExit("a step failed, see above")


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--against", type=Path)
    parser.add_argument("--set", nargs="*", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out")
    options = parser.parse_args()
    if options.serve:
        serve(options.compiled, options.ranks, options.set)
        return
    from report import finish

    layout = [*["--compiled"] * options.compiled, "--ranks", str(options.ranks)]
    contenders = {"this": Contender(ROOT, [*layout, "--set", *options.set])}
    if options.against:
        contenders["against"] = Contender(options.against.resolve(), layout)
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    for _ in range(WARM_UP + options.steps):
        for name, contender in contenders.items():
            taken[name].append(contender.step())
    rows = []
    for part in taken["this"][0]:
        row: dict[str, object] = {"part": part}
        for name, steps in taken.items():
            # The least: other work on the machine only adds.
            row[f"{name}, CPU ms"] = f"{min(step[part] for step in steps[WARM_UP:]):.2f}"
        rows.append(row)
    finish(f"host time, {' '.join(layout)}", rows, options.out)


if __name__ == "__main__":
    main()
