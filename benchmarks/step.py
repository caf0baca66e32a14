"""The cost of a training step beside a plain DiT: `python benchmarks/step.py [--size S/2] ...`.

Every contender makes a step from (model config, batch, device); the steps are taken in turn in one
process, so that a machine that slows down slows down all of them. CPU time is the honest figure on
a shared machine; ratios are medians of the ratios turn by turn. A contender of your own, from a
module in the current folder or on PYTHONPATH: `--contenders plain ours mymodule:make_step`.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from ours import resident_batch
from plain_dit import make_step as plain
from report import finish
from torch import Tensor

from titan_dit.config import CompileConfig, OptimizerConfig
from titan_dit.models.dit import DiTConfig
from titan_dit.objectives.rectified_flow import RectifiedFlow
from titan_dit.parallel.compile import compile_blocks
from titan_dit.parallel.init import initialize
from titan_dit.pipeline.local import LocalExecutor
from titan_dit.rng import SampleRNG
from titan_dit.state.optimizer import apply_gradients, build_optimizer

MakeStep = Callable[[DiTConfig, int, torch.device], Callable[[], Tensor]]


def ours(
    config: DiTConfig, batch: int, device: torch.device, compiled: bool = False
) -> Callable[[], Tensor]:
    """The same step from titan_dit's parts, its own random numbers included."""
    objective = RectifiedFlow()
    with torch.device("meta"):
        model = config.build(objective.output_channels(config.channels))
    compile_blocks(model, CompileConfig(enabled=compiled))
    initialize(model, model.init_laws(), 0, device)
    executor = LocalExecutor(model, objective.loss, None)
    optimizer = build_optimizer(model.parameters(), OptimizerConfig())
    data = resident_batch(config, batch, device)
    never = torch.zeros((), dtype=torch.bool, device=device)

    def step() -> Tensor:
        loss = executor.step(objective.prepare(data, SampleRNG(0, data.sample_numbers)))
        apply_gradients(optimizer, 1e-4, skip=never)
        return loss

    return step


def ours_compiled(config: DiTConfig, batch: int, device: torch.device) -> Callable[[], Tensor]:
    """`ours`, its blocks compiled."""
    return ours(config, batch, device, compiled=True)


def ours_without_onednn(
    config: DiTConfig, batch: int, device: torch.device
) -> Callable[[], Tensor]:
    """`ours`, its linear layers torch's own."""
    inner = ours(config, batch, device)

    def step() -> Tensor:
        with torch.backends.mkldnn.flags(enabled=False):
            return inner()

    return step


CONTENDERS: dict[str, MakeStep] = {
    "plain": plain,
    "ours": ours,
    "ours_compiled": ours_compiled,
    "ours_without_onednn": ours_without_onednn,
}


def find(name: str) -> MakeStep:
    """A contender by its name here, or by module:function."""
    if name in CONTENDERS:
        return CONTENDERS[name]
    module, _, function = name.partition(":")
    if not function:
        known = ", ".join(CONTENDERS)
        raise SystemExit(f"--contenders: {name} is none of {known} and no module:function.")
    sys.path.append(str(Path.cwd()))
    found: MakeStep = getattr(importlib.import_module(module), function)
    return found


def measure(steps: dict[str, Callable[[], Tensor]], turns: int) -> dict[str, list[list[float]]]:
    """CPU and wall seconds of every contender's step, turn by turn; the first turn is not kept."""
    seconds: dict[str, list[list[float]]] = {name: [] for name in steps}
    names = list(steps)
    for turn in range(turns + 1):
        # Each goes first equally often: the one behind another meets its cold caches.
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            cpu, wall = time.process_time(), time.perf_counter()
            steps[name]().item()
            if turn:
                seconds[name].append([time.process_time() - cpu, time.perf_counter() - wall])
    return seconds


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="S/2")
    parser.add_argument("--latent-size", type=int, default=32)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--contenders", nargs="+", default=["plain", "ours"])
    parser.add_argument("--out")
    options = parser.parse_args()
    config = DiTConfig(
        size=options.size, latent_size=options.latent_size, channels=4, num_classes=1000
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    steps = {name: find(name)(config, options.batch, device) for name in options.contenders}
    seconds = measure(steps, options.turns)
    base = options.contenders[0]
    rows = []
    for name, turns in seconds.items():
        ratios = [
            [mine[i] / other[i] for mine, other in zip(turns, seconds[base], strict=True)]
            for i in (0, 1)
        ]
        rows.append(
            {
                "contender": name,
                "CPU s": f"{statistics.median(cpu for cpu, _ in turns):.3f}",
                "wall s": f"{statistics.median(wall for _, wall in turns):.3f}",
                f"CPU / {base}": f"{statistics.median(ratios[0]):.3f}",
                f"wall / {base}": f"{statistics.median(ratios[1]):.3f}",
            }
        )
    finish(f"step {options.size} batch {options.batch}", rows, options.out)


if __name__ == "__main__":
    main()
