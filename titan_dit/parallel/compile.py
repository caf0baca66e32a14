"""torch.compile, block by block: all blocks share one graph, so it is compiled once.

Only this file uses the private counters of torch._dynamo and the C++ compiler lookup of
torch._inductor.
"""

from __future__ import annotations

import os
import subprocess
import sys

import torch
from torch import nn

from titan_dit.config.layout import CompileConfig
from titan_dit.config.section import UserError
from titan_dit.models.vocabulary import Vocabulary


def compile_blocks(model: nn.Module, config: CompileConfig) -> None:
    """Compile in place, before fully_shard; parameter names do not change."""
    if not config.enabled:
        return
    parts = list(model.get_submodule("blocks").children())
    if config.ends:
        parts += [p for name, p in model.named_children() if name != "blocks" and not scores(p)]
    options = None
    if config.cuda_graphs:
        options = {"triton.cudagraphs": True}
        # Outputs of the last pass may be overwritten.
        model.register_forward_pre_hook(begin_pass)
    for part in parts:
        part.compile(fullgraph=True, options=options)


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
    """Counts recompilations: graphs that training steps compile after the first step.

    Graphs compiled between steps, such as for drawing samples, do not count.
    """

    def __init__(self) -> None:
        self.count = 0
        self._reported = 0
        self._is_first = True
        self._before = 0

    def __enter__(self) -> None:
        """Start of a step."""
        self._before = num_graphs()

    def __exit__(self, *_: object) -> None:
        """End of a step."""
        if not self._is_first:
            self.count += num_graphs() - self._before
        self._is_first = False

    def report(self) -> str | None:
        """A console line if there were recompilations since the last call, else None."""
        if self.count == self._reported:
            return None
        self._reported = self.count
        return (
            f"recompiled {self.count} graphs after the first step: shapes or settings change "
            "between steps. Set TORCH_LOGS=recompiles to see why"
        )
