"""torch.compile, block by block: all blocks share one graph, so it is compiled once.

The only file that reads torch._dynamo's counters and asks torch._inductor for its compiler: neither
is public.
"""

from __future__ import annotations

import os
import subprocess
import sys

import torch
from torch import nn

from titan_dit.config.layout import CompileConfig
from titan_dit.config.section import UserError


def compile_blocks(model: nn.Module, config: CompileConfig) -> None:
    """Compile in place, before fully_shard; the names of parameters stay."""
    if not config.enabled:
        return
    parts = list(model.get_submodule("blocks").children())
    if config.ends:
        parts += [part for name, part in model.named_children() if name != "blocks"]
    options = None
    if config.cuda_graphs:
        options = {"triton.cudagraphs": True}
        # What the last pass left in the graphs' memory is needed no more.
        model.register_forward_pre_hook(begin_pass)
    for part in parts:
        part.compile(fullgraph=True, options=options)


def begin_pass(*_: object) -> None:
    """Before a forward pass of the model."""
    torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]


def check(config: CompileConfig, device: torch.device) -> None:
    """Compile one addition for the device, as a step will be.

    Raises a UserError where that fails: no C++ compiler (a CPU), no C compiler or no Triton (a
    GPU), a cache folder that cannot be written to.
    """
    if not config.enabled:
        return
    if config.cuda_graphs and device.type != "cuda":
        raise UserError(
            f"[compile] cuda_graphs=true needs a GPU, and this is a {device.type}. "
            "Set cuda_graphs = false."
        )
    try:
        if device.type == "cpu":
            spare_probes()
        torch.compile(increment, fullgraph=True)(torch.zeros(8, device=device))
    except Exception as error:  # torch has no class for all of it
        compiler = "a C++ compiler (g++, or what CXX names)"
        if device.type == "cuda":
            compiler = "Triton and a C compiler (gcc, or what CC names)"
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UserError(
            "[compile] enabled=true, but torch.compile fails on this machine: "
            f"{reason[:300]}. It needs {compiler} and a cache folder it can write to "
            f"(TORCHINDUCTOR_CACHE_DIR={os.environ.get('TORCHINDUCTOR_CACHE_DIR', 'not set')}). "
            "Set [compile] enabled = false, or install what is missing."
        ) from error


def spare_probes() -> None:
    """Let torch take the vector instructions that the CPU says it has, if the compiler knows them.

    With an empty cache it would compile and load a probe for each kind of them, 3 s each. That the
    best kind works, the addition shows.
    """
    import torch._inductor.config as inductor
    from torch._inductor import cpp_builder, cpu_vec_isa

    # The addition may be in the cache already, the blocks not.
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
    """What is compiled to see whether it can be."""
    return x + 1


def num_graphs() -> int:
    """Graphs compiled by this process so far."""
    if "torch._dynamo.utils" not in sys.modules:
        return 0  # Nothing has been compiled; loading it takes a second.
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


class Recompiles:
    """Counts graphs that training steps compile after the first one, which compiles them all.

    What is compiled between steps, such as for drawing samples, is not counted.
    """

    def __init__(self) -> None:
        self.count = 0
        self._told = 0
        self._is_first = True
        self._before = 0

    def __enter__(self) -> None:
        """Before a step."""
        self._before = num_graphs()

    def __exit__(self, *_: object) -> None:
        """After a step."""
        if not self._is_first:
            self.count += num_graphs() - self._before
        self._is_first = False

    def news(self) -> str | None:
        """A line for the console when there were more since the last time."""
        if self.count == self._told:
            return None
        self._told = self.count
        return (
            f"compiled {self.count} graphs again after the first step: shapes or settings change "
            "from step to step. TORCH_LOGS=recompiles says why"
        )
