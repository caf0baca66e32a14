"""Kernel launches of a training step outside the blocks: `python benchmarks/launches.py`.

Uncompiled: the operators that a dispatch mode sees, without views and allocations. Compiled: the
nodes of Inductor's schedule after fusion; each is a kernel or a library call. A foreach or fused
call over all parameters counts once; on a GPU it is a few launches, by the number of elements.

Where the code chooses by device it runs as on a GPU, with the GPU's settings of the compiler. But
it is compiled for a CPU: a GPU's fusions differ here and there.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from ours import MAX_GRAD_NORM, learning, loss_of, network, resident_batch
from report import finish
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from titan_dit.config.layout import CompileConfig
from titan_dit.config.operation import FaultsConfig
from titan_dit.diffusion.sections import DDPMConfig, DiffusionConfig, RectifiedFlowConfig
from titan_dit.execution import scored
from titan_dit.models.dit_config import DiTConfig
from titan_dit.optim.ema import move_together
from titan_dit.optim.gradient_norm import clip_factor, clip_norm, square_sum
from titan_dit.optim.optimizer import apply_gradients, build_optimizer
from titan_dit.optim.sections import AdamWConfig
from titan_dit.parallel.compile import compile_prepare, compile_score
from titan_dit.parallel.init import initialize
from titan_dit.recovery.bad_steps import Guard
from titan_dit.rng import SampleRNG

SILENT = {
    "view",
    "_unsafe_view",
    "alias",
    "as_strided",
    "detach",
    "empty",
    "empty_like",
    "empty_strided",
    "expand",
    "permute",
    "select",
    "slice",
    "split",
    "squeeze",
    "t",
    "transpose",
    "unbind",
    "unsqueeze",
    "_reshape_alias",
    "lift_fresh",
}
"""Operators without a kernel."""
CPU, GPU = torch.device("cpu"), torch.device("cuda")


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that run a kernel."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operator; count it."""
        self.count += func.overloadpacket.__name__ not in SILENT
        return func(*args, **kwargs or {})


def operators(work: Callable[[], object]) -> int:
    """Operators of a call."""
    with Operators() as counted:
        work()
    return counted.count


@contextmanager
def scheduled() -> Iterator[list[int]]:
    """The nodes of every graph that Inductor compiles in the block."""
    import torch._inductor.config as inductor
    from torch._inductor import scheduler

    found: list[int] = []
    original = scheduler.Scheduler.codegen

    def codegen(self: Any) -> Any:
        silent = scheduler.NopKernelSchedulerNode
        found.append(sum(not isinstance(node, silent) for node in self.nodes))
        return original(self)

    scheduler.Scheduler.codegen = codegen  # type: ignore[method-assign]
    try:
        with inductor.patch(force_disable_caches=True):
            yield found
    finally:
        scheduler.Scheduler.codegen = original  # type: ignore[method-assign]


def kernels(work: Callable[[], object]) -> int:
    """Nodes of the graphs that a call compiles; it runs each of them once."""
    torch.compiler.reset()
    with scheduled() as found:
        work()
    return sum(found)


def of_objective(path: DiffusionConfig, config: DiTConfig, batch: int) -> dict[str, list[int]]:
    """Launches of `prepare` and of the loss with its backward: uncompiled, compiled."""
    data, objective = resident_batch(config, batch, CPU), learning(config, path)
    rng, name = SampleRNG(0, data.sample_numbers), path.name
    prepared = objective.prepare(data, rng)  # Fills its caches.
    values = config.token_shape[1] // config.in_channels * path.output_channels(config.in_channels)
    prediction = torch.randn(batch, config.token_shape[0], values, requires_grad=True)

    def score_and_backward(compilation: CompileConfig) -> None:
        score = compile_score(scored, objective, compilation, GPU)
        torch.autograd.backward(*score(loss_of(objective), prediction, prepared))

    eager, compiled = CompileConfig(), CompileConfig(enabled=True)
    return {
        f"{name}: prepare": [
            operators(lambda: compile_prepare(objective, eager, GPU)(data, rng)),
            kernels(lambda: compile_prepare(objective, compiled, GPU)(data, rng)),
        ],
        f"{name}: loss": [
            operators(lambda: score_and_backward(eager)),
            kernels(lambda: score_and_backward(compiled)),
        ],
    }


def of_ends(config: DiTConfig, batch: int) -> dict[str, list[int]]:
    """Launches of embed and head with their backwards: uncompiled, compiled by [compile] ends."""
    model = network(config, RectifiedFlowConfig())
    initialize(model, model.initializers(), 0, CPU)
    objective, data = learning(config, RectifiedFlowConfig()), resident_batch(config, batch, CPU)
    prepared = objective.prepare(data, SampleRNG(0, data.sample_numbers))
    tokens = torch.randn(batch, config.token_shape[0], config.shape[0], requires_grad=True)
    stream = tokens, torch.randn(batch, config.shape[0], requires_grad=True)

    def run(part: Any, given: Mapping[str, Tensor] | tuple[Tensor, ...]) -> None:
        out = part(given, prepared.side_inputs)
        outputs = (out,) if isinstance(out, Tensor) else out
        torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])

    found = {}
    for name, given in (("embed", prepared.inputs), ("head", stream)):
        part: Any = getattr(model, name)
        ones = 1 if name == "head" else 2
        eager = operators(lambda part=part, given=given: run(part, given)) - ones  # type: ignore[misc]
        compiled = torch.compile(part)
        found[name] = [eager, kernels(lambda part=compiled, given=given: run(part, given))]  # type: ignore[misc]
    return found


def of_clip(config: DiTConfig) -> dict[str, list[int]]:
    """Launches of clipping: uncompiled, as on a GPU with [compile]."""
    parameters = list(network(config, RectifiedFlowConfig()).to_empty(device=CPU).parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    norms = torch.ones(len(parameters))
    eager = operators(lambda: clip_norm(parameters, MAX_GRAD_NORM))
    scalars = operators(lambda: clip_factor(square_sum(norms, 1), MAX_GRAD_NORM))
    compiled = kernels(lambda: clip_norm(parameters, MAX_GRAD_NORM, compiled=True))
    return {"clip": [eager, eager - scalars + compiled]}


def of_update(config: DiTConfig) -> dict[str, list[int]]:
    """Launches after clipping, as on a GPU. They are not compiled."""
    model = network(config, RectifiedFlowConfig())
    initialize(model, model.initializers(), 0, CPU)
    parameters = list(model.parameters())
    optimizer = build_optimizer(dict(model.named_parameters()), AdamWConfig(), config.spec())
    guard = Guard(FaultsConfig(), CPU)

    def give_gradients() -> None:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)

    give_gradients()
    apply_gradients(optimizer, 1e-4, torch.tensor(False))  # Makes AdamW's state.
    give_gradients()
    norm, bad = torch.ones(()), torch.tensor(False)
    weights = [p.detach() for p in parameters]
    averages = [w.clone() for w in weights]

    def average() -> None:
        move_together(averages, weights, 0.1, bad.float())

    counts = {
        "guard": operators(lambda: guard.check(1, 0, norm, norm)),
        "optimizer": operators(lambda: apply_gradients(optimizer, 1e-4, bad)),
        "EMA, as on a GPU": operators(average),
    }
    return {name: [count, count] for name, count in counts.items()}


def main() -> None:
    """Count and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--out")
    options = parser.parse_args()
    config = DiTConfig(
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        patch_size=2,
        latent_size=8,
        in_channels=4,
        num_classes=10,
    )
    found: dict[str, list[int]] = {}
    for path in (RectifiedFlowConfig(), DDPMConfig()):
        found |= of_objective(path, config, options.batch)
    found |= of_ends(config, options.batch) | of_clip(config) | of_update(config)
    rows = [
        {"part": name, "uncompiled": counts[0], "compiled": counts[1]}
        for name, counts in found.items()
    ]
    for path in (RectifiedFlowConfig(), DDPMConfig()):
        mine = [counts for name, counts in found.items() if name.split(":")[0] in (name, path.name)]
        ends = sum(found[name][0] - found[name][1] for name in ("embed", "head"))
        total = [sum(column) for column in zip(*mine, strict=True)]
        title = f"{path.name}: all, with [compile] ends"
        rows.append({"part": title, "uncompiled": total[0], "compiled": total[1]})
        title = f"{path.name}: all, without"
        rows.append({"part": title, "uncompiled": total[0], "compiled": total[1] + ends})
    finish("launches outside the blocks", rows, options.out)


if __name__ == "__main__":
    main()
