"""The Triton code that torch.compile generates for an H100, without a GPU, CUDA or Triton.

Inductor decides what becomes a kernel, and writes it, from the properties of the device alone. The
graph is traced and run on the CPU; only what Inductor lowers is said to be on a GPU. For a process
of its own: the properties of the GPU stay in torch's caches.
"""

import contextlib
import copy
import functools
import re
import time
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import torch
from torch._dynamo.device_interface import CudaInterface
from torch._functorch import config as aot_config
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor import compile_fx, config, scheduler
from torch._inductor.graph import GraphLowering
from torch.utils import _pytree as pytree

DEVICE = torch.device("cuda", 0)
H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    warp_size=32,
    total_memory=85_000_000_000,
    L2_cache_size=52_428_800,
    clock_rate=1_980_000,
    memory_clock_rate=2_619_000,
    memory_bus_width=5120,
)
KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)''',", re.DOTALL)


@dataclass(frozen=True)
class Generated:
    """What was made of a graph."""

    kernels: dict[str, str]
    """Source by name."""
    code: str
    """The whole module: the kernels, and what calls them and the libraries' products."""
    num_nodes: int
    """Operators of the graph."""
    seconds: float
    """CPU time of lowering, scheduling and writing the code: a device would wait for it."""

    @property
    def most_lines(self):
        return max(len(kernel.splitlines()) for kernel in self.kernels.values())


class HasCode(Exception):
    """Ends a compilation: there is no compiler for the code."""


class Lowering(GraphLowering):
    """Lowers a graph of the CPU as one of the GPU."""

    def __init__(self, gm, example_inputs=None, **options):
        self.began = time.process_time()
        for node in gm.graph.nodes:
            node.args, node.kwargs = pytree.tree_map(on_gpu, (node.args, node.kwargs))
            if "val" in node.meta:
                node.meta["val"] = pytree.tree_map(on_gpu, node.meta["val"])
        self.num_nodes = len(gm.graph.nodes)
        self.given = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
        super().__init__(gm, example_inputs=self.given, **options)

    def run(self, *_):
        return super().run(*self.given)

    def codegen(self):
        code = super().codegen()[0]
        seconds = time.process_time() - self.began
        code = getattr(code, "value", code)
        kernels = dict(KERNEL.findall(code))
        raise HasCode(Generated(kernels, code, self.num_nodes, seconds))


def on_gpu(value):
    """The same device, or fake tensor, of the GPU."""
    if isinstance(value, torch.device):
        return DEVICE
    if isinstance(value, torch.Tensor):
        with value.fake_mode:
            value = value.detach().clone()
        value.fake_device = DEVICE
    return value


@contextlib.contextmanager
def generating():
    """torch.compile adds what it generates for a GPU to the list, and runs the graphs as they are.

    In the order of compilation: the graph of a forward before that of its backward.
    """
    found = []

    def generate(gm, inputs, **options):
        own, before = copy.deepcopy(gm), len(found)
        try:
            compile_fx.compile_fx_inner(own, inputs, **options)
        except Exception as end:
            while not isinstance(end, HasCode):  # Inductor wraps errors in its own.
                if end.__cause__ is None and end.__context__ is None:
                    raise
                end = end.__cause__ or end.__context__
            found.append(end.args[0])
        assert len(found) == before + 1
        return make_boxed_func(gm.forward)

    compiler = functools.partial(compile_fx.compile_fx, inner_compile=generate)
    properties = staticmethod(lambda *_: H100)
    with contextlib.ExitStack() as stack:
        for home, name, value in (
            (compile_fx, "compile_fx", compiler),
            (compile_fx, "GraphLowering", Lowering),
            (scheduler, "has_triton", lambda *_: True),
            (CudaInterface, "is_available", staticmethod(lambda: True)),
            (CudaInterface, "is_bf16_supported", staticmethod(lambda *_, **__: True)),
            (CudaInterface, "get_compute_capability", staticmethod(lambda *_: 90)),
            (CudaInterface, "get_device_properties", properties),
            (CudaInterface.Worker, "get_device_properties", properties),
            (CudaInterface.Worker, "current_device", staticmethod(lambda: 0)),
            (torch.cuda, "get_device_capability", lambda *_: (9, 0)),
            (torch.cuda, "get_device_properties", lambda *_: H100),
            (torch.utils._triton, "triton_hash_with_backend", lambda: ""),
        ):
            stack.enter_context(mock.patch.object(home, name, value))
        stack.enter_context(config.patch(fx_graph_cache=False, compile_threads=1))
        stack.enter_context(aot_config.patch(enable_autograd_cache=False))
        yield found
