"""torch.compile of an objective: `prepare`, and the loss in training.

Uncompiled they are hundreds of small kernels: the rounds of the counter-based generator, the terms
of the variational bound. Integers keep their bits, floats are equal up to rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from titan_dit.config.layout import CompileConfig
from titan_dit.data.base import Batch
from titan_dit.objectives.base import Objective, Prepared
from titan_dit.rng import SampleRNG, stream_key

Score = TypeVar("Score", bound=Callable[..., Any])
"""`Executor.score`."""
FEW_KERNELS = {"realize_opcount_threshold": 100, "realize_reads_threshold": 1000}
"""Settings of inductor. By default a value that takes 30 operators, or has 4 readers, gets a kernel
of its own; below these limits each reader computes it again. On a GPU a launch costs more; on a CPU
the loss of ddpm would take twice the time.

Among the values are the rounds of the random generator: the longest kernel of `prepare` has 400
lines at 100 operators, 1,000 at 150 and 4,500 from 400 on. The last took torch 2.11 and Triton two
minutes before the first step, for 2 kernels instead of 7."""


def compile_prepare(
    objective: Objective, config: CompileConfig, device: torch.device
) -> Callable[[Batch, SampleRNG], Prepared]:
    """`Objective.prepare` for training, whose batches all have the same shapes."""
    if not compiles(config):
        return objective.prepare
    compiled = compile_function(objective.prepare, objective, device)
    is_first = True

    def prepare(batch: Batch, rng: SampleRNG) -> Prepared:
        nonlocal is_first
        if is_first:
            # Fills the objective's caches: with other contents a second graph would be compiled.
            objective.prepare(batch, rng)
            is_first = False
        prepared: Prepared = compiled(batch, rng)
        return prepared

    return prepare


def compile_score(
    score: Score, objective: Objective, config: CompileConfig, device: torch.device
) -> Score:
    """Compile `Executor.score` for training; validation runs the loss uncompiled.

    Returned unchanged if the objective has modules: FSDP2 gathers them in hooks, which a graph
    cannot contain.
    """
    if not compiles(config) or objective.modules() is not None:
        return score
    compiled = compile_function(score, objective, device)
    on_device = functools.lru_cache(maxsize=1)(scalar)

    def scored(loss: Any, output: Any, part: Prepared) -> Any:
        total = part.total_tokens
        if not isinstance(total, Tensor):
            # A number would be a constant of the graph: another total would be another graph, and
            # the share a product, of which `value - value` may be the rounding error (an FMA).
            part = replace(part, total_tokens=on_device(total, part.weight.device))
        return compiled(loss, output, part)

    return cast(Score, scored)


def scalar(value: float, device: torch.device) -> Tensor:
    """An fp64 scalar, filled on the device: a copy from the host would wait for it."""
    return torch.full((), value, dtype=torch.float64, device=device)


def compiles(config: CompileConfig) -> bool:
    """True if objectives are compiled."""
    return config.enabled and config.objective


def compile_function(
    function: Callable[..., Any], objective: Objective, device: torch.device
) -> Callable[..., Any]:
    """Compile a function of an objective for a device, for the shapes that it is called with.

    Parts that the compiler cannot trace run between two graphs. After a few other shapes it stops
    compiling and runs the function eagerly.
    """
    for constant in (stream_key, *objective.constants):
        torch.compiler.assume_constant_result(constant)  # type: ignore[no-untyped-call]
    options: dict[str, Any] | None = None if device.type == "cpu" else {**FEW_KERNELS}
    return torch.compile(function, dynamic=False, options=options)
