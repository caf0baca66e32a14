"""Counts, parts and a device made by hand, so that times can be worked out by hand."""

import torch

from titan_dit.planner.hardware import Device, Efficiency, Overhead
from titan_dit.planner.work import Counts, Part, Product, Work

DEVICE = Device(
    name="by hand",
    memory_gib=80.0,
    peak_tflops={"fp64": 1.0, "fp32": 1.0, "bf16": 1.0, "fp16": 1.0, "float8": 2.0},
    copy_gb_per_s=1000.0,
    gpus_per_node=4,
    inner_gb_per_s={2: 100.0},
    inner_latency_us=0.0,
    nics_per_node=4,
    nic_gb_per_s=10.0,
    node_latency_us=0.0,
    launch_us=0.0,
    efficiency=Efficiency(products=1.0, attention=1.0, moved=1.0, inner=1.0, node=1.0),
    overhead=Overhead(context_mib=0.0, communicator_mib=0.0, allocator=1.0),
    error=0.1,
)
NOTHING = Work()


def moving(seconds, **more):
    """Work that takes so long on DEVICE, in elementwise operators."""
    nbytes = seconds * 1e12
    return Work(moved=nbytes, fused=nbytes, **more)


def multiplying(seconds, *, is_weight_gradient=False, side=2**14):
    """Products that take so long on DEVICE, times 1 + 96 / side (`rates.shape_factor`)."""
    product = Product(1, side, side, side, "bf16", is_weight_gradient)
    count = seconds * 1e12 / (product.flops * (1 + 96 / side))
    return Work(products={product: count})


def part(forward=NOTHING, backward=NOTHING, update=NOTHING, parameters=0.0, trained=None):
    """A part with these passes."""
    return Part(
        forward=forward,
        backward=backward,
        update=update,
        parameters=parameters,
        trained=parameters if trained is None else trained,
        buffers=0.0,
        kept=0.0,
        forward_peak=0.0,
        backward_peak=0.0,
        backward_gradients=0.0,
        tensors=1,
    )


def counts(embed=None, block=None, head=None, prepare=NOTHING, stream=0.0, tied=0.0):
    """Counts of parts; without one it does nothing."""
    embed, block, head = (given or part() for given in (embed, block, head))
    return Counts(
        embed=embed,
        blocks={"": block},
        head=head,
        prepare=prepare,
        inputs=0.0,
        static=0.0,
        stream=stream,
        tied=tied,
    )


def counts_of(plan):
    """Counts with the parameters of a plan's real model, which do nothing."""
    with torch.device("meta"):
        model = plan.spec.build()
    tied = set(model.tied)
    num = {
        name: sum(p.numel() for n, p in module.named_parameters(prefix=name) if n not in tied)
        for name, module in (
            ("embed", model.embed),
            ("blocks.0", model.blocks["0"]),
            ("head", model.head),
        )
    }
    copied = sum(model.get_parameter(name).numel() for name in model.tied.values())
    return counts(
        embed=part(parameters=num["embed"]),
        block=part(parameters=num["blocks.0"]),
        head=part(parameters=num["head"]),
        tied=copied,
    )
