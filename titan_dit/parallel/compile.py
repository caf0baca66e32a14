"""torch.compile: block by block, and `prepare` and the loss of the objective in training.

All blocks share one graph, so it is compiled once.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from titan_dit.config.layout import CompileConfig
from titan_dit.config.section import UserError
from titan_dit.data.base import Batch
from titan_dit.models.vocabulary import Vocabulary
from titan_dit.objectives.base import Objective, Prepared
from titan_dit.rng import SampleRNG, stream_key


def compile_blocks(model: nn.Module, config: CompileConfig, tp: int = 1) -> None:
    """Compile in place, before fully_shard; parameter names do not change.

    `tp`: tensor-parallel ranks.
    """
    if not config.enabled:
        return
    parts = list(model.get_submodule("blocks").children())
    if config.ends:
        own = ("blocks", "objective")
        parts += [p for name, p in model.named_children() if name not in own and not scores(p)]
    options = None
    if config.cuda_graphs:
        options = {"triton.cudagraphs": True}
        # Outputs of the last pass may be overwritten.
        model.register_forward_pre_hook(begin_pass)
    for part in parts:
        part.compile(fullgraph=True, options=options, dynamic=dynamic(config, tp))


def dynamic(config: CompileConfig, tp: int) -> bool | None:
    """torch.compile's `dynamic`: None makes a dim dynamic once it has had two sizes."""
    each = config.shapes == "each" or (config.shapes == "auto" and tp > 1)
    return False if each else None


def expect_shapes(number: int) -> None:
    """Let one function have graphs of `number` shapes; by default torch stops at eight."""
    if number > 1:
        from torch._dynamo import config as dynamo

        # Another graph of each for validation, whose batches may have other sizes.
        each = 2 * number + 8
        dynamo.recompile_limit = max(dynamo.recompile_limit, each)
        dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, 64 * each)


def scores(part: nn.Module) -> bool:
    """True if a part has a vocabulary's loss: its chunks and collectives fit no full graph."""
    return any(isinstance(module, Vocabulary) for module in part.modules())


def begin_pass(*_: object) -> None:
    """Forward pre-hook: a new iteration of the CUDA graphs begins."""
    torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]


def check(config: CompileConfig, device: torch.device) -> None:
    """Compile one addition for the device.

    Raises UserError if that fails: no C++ compiler (CPU), no C compiler or no Triton (GPU), or a
    cache folder that is not writable.
    """
    if not config.enabled:
        return
    if config.cuda_graphs and device.type != "cuda":
        raise UserError(
            f"[compile] cuda_graphs=true needs a GPU, but the device is a {device.type}. "
            "Set cuda_graphs = false."
        )
    try:
        if device.type == "cpu":
            skip_probes()
        torch.compile(increment, fullgraph=True)(torch.zeros(8, device=device))
    except Exception as error:  # torch has no common class for these
        compiler = "a C++ compiler (g++ or $CXX)"
        if device.type == "cuda":
            compiler = "Triton and a C compiler (gcc or $CC)"
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UserError(
            "[compile] enabled=true, but torch.compile fails on this machine: "
            f"{reason[:300]}. It needs {compiler} and a writable cache folder "
            f"(TORCHINDUCTOR_CACHE_DIR={os.environ.get('TORCHINDUCTOR_CACHE_DIR', 'not set')}). "
            "Set [compile] enabled = false, or install the missing part."
        ) from error


def skip_probes() -> None:
    """Skip inductor's vector ISA probes if the compiler accepts the flags of all the CPU's ISAs.

    With an empty cache inductor compiles and loads each probe, in 3 s. The addition in `check`
    tests the widest instructions anyway.
    """
    import torch._inductor.config as inductor
    from torch._inductor import cpp_builder, cpu_vec_isa

    # Raises without a compiler, even if the addition is in the cache: the blocks may not be.
    compiler = cpp_builder.get_cpp_compiler()
    if inductor.cpp.vec_isa_ok is not None:
        return
    has = cpu_vec_isa.x86_isa_checker()
    kinds = [k for k in cpu_vec_isa.supported_vec_isa_list if set(str(k).split()) <= set(has)]
    if not kinds:
        return
    flags = " ".join(kind.build_arch_flags() for kind in kinds).split()
    command = [compiler, *flags, "-fsyntax-only", "-x", "c++", os.devnull]
    if subprocess.run(command, capture_output=True, check=False).returncode == 0:
        inductor.cpp.vec_isa_ok = True


def increment(x: torch.Tensor) -> torch.Tensor:
    """The function that `check` compiles."""
    return x + 1


def num_graphs() -> int:
    """Number of graphs compiled by this process so far."""
    if "torch._dynamo.utils" not in sys.modules:
        return 0  # Nothing has been compiled, and the import takes a second.
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


class Recompiles:
    """Counts recompilations: graphs that training steps compile after the first step of a bucket.

    Graphs compiled between steps, such as for drawing samples, do not count.
    """

    def __init__(self) -> None:
        self.count = 0
        self._reported = 0
        self._seen: set[tuple[tuple[str, torch.Size], ...]] = set()

    @contextmanager
    def during(self, batch: Batch) -> Iterator[None]:
        """Count what the block compiles, unless it is the first step with batches of this shape."""
        shapes = tuple((name, value.shape) for name, value in batch.fields.items())
        before = num_graphs()
        yield
        if shapes in self._seen:
            self.count += num_graphs() - before
        self._seen.add(shapes)

    def report(self) -> str | None:
        """A console line if there were recompilations since the last call, else None."""
        if self.count == self._reported:
            return None
        self._reported = self.count
        return (
            f"recompiled {self.count} graphs after the first step: shapes or settings change "
            "between steps. Set TORCH_LOGS=recompiles to see why"
        )


Score = TypeVar("Score", bound=Callable[..., Any])
"""Type of `Executor.score`, kept by its compilation."""
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
    """`Objective.prepare` for training, whose batches have the same shapes in each bucket."""
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
