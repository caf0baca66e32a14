"""Time of a training step against a plain DiT: `python benchmarks/step.py [--bf16] ...`.

A contender is a function (model config, batch, device) -> step. Steps run in turn in one process,
so that a slowdown of the machine affects all of them. On a shared machine use CPU time; ratios are
medians over turns.

With --bf16: the plain DiT under autocast with an EMA, eager and compiled as a whole; ours as in the
trainer, with clipping, EMA and compiled blocks. `--contenders adamw adamw8bit adamw4bit adamw_fp8`:
the trainer's step in fp32 by optimizer. Your own contender, from a module in the
current folder or on PYTHONPATH: `--contenders plain ours mymodule:make_step`.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import plain_dit
import torch
from ours import learning, loss_of, network, randomize, resident_batch, trainer_step
from plain_dit import make_step as plain
from report import finish
from torch import Tensor, nn

from titan_dit.config.layout import CompileConfig, PrecisionConfig
from titan_dit.diffusion.sections import RectifiedFlowConfig
from titan_dit.execution import LocalExecutor
from titan_dit.kernels import linear
from titan_dit.models.dit_config import DiTConfig
from titan_dit.optim.optimizer import OptimizerConfig, apply_gradients, build_optimizer
from titan_dit.optim.sections import (
    AdamW4bitConfig,
    AdamW8bitConfig,
    AdamWConfig,
    AdamWFp8Config,
)
from titan_dit.parallel.compile import compile_blocks
from titan_dit.parallel.init import initialize
from titan_dit.parallel.mesh import AxisSizes, Mesh
from titan_dit.ranks import process_group
from titan_dit.rng import SampleRNG

MakeStep = Callable[[DiTConfig, int, torch.device], Callable[[], Tensor]]


def eager(model: nn.Module) -> None:
    """Do not compile."""


def blocks(model: nn.Module) -> None:
    """Compile block by block."""
    compile_blocks(model, CompileConfig(enabled=True))


def ours(
    config: DiTConfig,
    batch: int,
    device: torch.device,
    change: Callable[[nn.Module], None] = eager,
) -> Callable[[], Tensor]:
    """titan_dit's step in fp32, with its random numbers; `change` modifies the model."""
    model, objective = (
        network(config, RectifiedFlowConfig()),
        learning(config, RectifiedFlowConfig()),
    )
    change(model)
    initialize(model, model.initializers(), 0, device)
    if device.type == "cpu":
        linear.apply(model)
    executor = LocalExecutor(model, loss_of(objective), None)
    optimizer = build_optimizer(dict(model.named_parameters()), AdamWConfig(), config.spec())
    data = resident_batch(config, batch, device)
    never = torch.zeros((), dtype=torch.bool, device=device)

    def step() -> Tensor:
        loss = executor.step(objective.prepare(data, SampleRNG(0, data.sample_numbers)))
        apply_gradients(optimizer, 1e-4, skip=never)
        return loss

    return step


def ours_compiled(config: DiTConfig, batch: int, device: torch.device) -> Callable[[], Tensor]:
    """`ours` with compiled blocks."""
    return ours(config, batch, device, blocks)


def ours_without_onednn(
    config: DiTConfig, batch: int, device: torch.device
) -> Callable[[], Tensor]:
    """`ours` with oneDNN disabled."""
    inner = ours(config, batch, device)

    def step() -> Tensor:
        with torch.backends.mkldnn.flags(enabled=False):
            return inner()

    return step


def plain_bf16(
    config: DiTConfig, batch: int, device: torch.device, compiled: bool = False
) -> Callable[[], Tensor]:
    """The plain DiT under autocast."""
    learn = plain_dit.RectifiedFlow()
    with device:
        model = plain_dit.PlainDiT(config, learn.output_channels(config.in_channels))
    randomize(list(model.parameters()))
    if compiled:
        model.compile()
    return plain_dit.training_step(model, config, batch, learn, autocast=torch.bfloat16, ema=True)


def plain_bf16_compiled(
    config: DiTConfig, batch: int, device: torch.device
) -> Callable[[], Tensor]:
    """`plain_bf16`, compiled as a whole."""
    return plain_bf16(config, batch, device, compiled=True)


def ours_bf16(
    config: DiTConfig, batch: int, device: torch.device, compiled: bool = False
) -> Callable[[], Tensor]:
    """The trainer's step, on a mesh of one rank."""
    mesh = Mesh(AxisSizes(), device.type)
    return trainer_step(config, batch, device, RectifiedFlowConfig(), mesh, compiled=compiled)


def ours_bf16_compiled(config: DiTConfig, batch: int, device: torch.device) -> Callable[[], Tensor]:
    """`ours_bf16` with compiled blocks."""
    return ours_bf16(config, batch, device, compiled=True)


def trained_by(optimizer: OptimizerConfig) -> MakeStep:
    """The trainer's step in fp32 with compiled blocks and an optimizer."""

    def make(config: DiTConfig, batch: int, device: torch.device) -> Callable[[], Tensor]:
        return trainer_step(
            config,
            batch,
            device,
            RectifiedFlowConfig(),
            Mesh(AxisSizes(), device.type),
            compiled=True,
            precision=PrecisionConfig(dtype="fp32"),
            optimizer_config=optimizer,
        )

    return make


CONTENDERS: dict[str, MakeStep] = {
    "plain": plain,
    "ours": ours,
    "ours_compiled": ours_compiled,
    "ours_without_onednn": ours_without_onednn,
    "plain_bf16": plain_bf16,
    "plain_bf16_compiled": plain_bf16_compiled,
    "ours_bf16": ours_bf16,
    "ours_bf16_compiled": ours_bf16_compiled,
    "adamw": trained_by(AdamWConfig()),
    "adamw8bit": trained_by(AdamW8bitConfig()),
    "adamw4bit": trained_by(AdamW4bitConfig()),
    "adamw_fp8": trained_by(AdamWFp8Config()),
}
USUAL = ["plain", "ours"]
USUAL_BF16 = ["plain_bf16", "plain_bf16_compiled", "ours_bf16_compiled"]


def find(name: str) -> MakeStep:
    """A contender by name, or by module:function."""
    if name in CONTENDERS:
        return CONTENDERS[name]
    module, _, function = name.partition(":")
    if not function:
        known = ", ".join(CONTENDERS)
        raise SystemExit(f"--contenders {name}: choose from {known}, or give module:function.")
    sys.path.append(str(Path.cwd()))
    found: MakeStep = getattr(importlib.import_module(module), function)
    return found


def measure(steps: dict[str, Callable[[], Tensor]], turns: int) -> dict[str, list[list[float]]]:
    """(CPU, wall) seconds of every contender by turn; the first turn is a warm-up."""
    seconds: dict[str, list[list[float]]] = {name: [] for name in steps}
    names = list(steps)
    for turn in range(turns + 1):
        # Each goes first equally often, because a step leaves cold caches to the next.
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            cpu, wall = time.process_time(), time.perf_counter()
            steps[name]().item()
            if turn:
                seconds[name].append([time.process_time() - cpu, time.perf_counter() - wall])
    return seconds


def table(seconds: dict[str, list[list[float]]]) -> list[dict[str, str]]:
    """One row per contender, with ratios to the first and to every plain one."""
    bases = [name for number, name in enumerate(seconds) if not number or name.startswith("plain")]
    rows = []
    for name, turns in seconds.items():
        row = {"contender": name}
        for i, clock in enumerate(("CPU", "wall")):
            row[f"{clock} s"] = f"{statistics.median(turn[i] for turn in turns):.3f}"
            for base in bases:
                ratios = [
                    mine[i] / other[i] for mine, other in zip(turns, seconds[base], strict=True)
                ]
                row[f"{clock} / {base}"] = f"{statistics.median(ratios):.3f}"
        rows.append(row)
    return rows


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="S/2")
    parser.add_argument("--latent-size", type=int, default=32)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--contenders", nargs="+")
    parser.add_argument("--out")
    options = parser.parse_args()
    names = options.contenders or (USUAL_BF16 if options.bf16 else USUAL)
    config = DiTConfig(
        size=options.size, latent_size=options.latent_size, in_channels=4, num_classes=1000
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with process_group.start(device.type) as world:
        steps = {name: find(name)(config, options.batch, world.device) for name in names}
        seconds = measure(steps, options.turns)
    finish(f"step {options.size} batch {options.batch}", table(seconds), options.out)


if __name__ == "__main__":
    main()
