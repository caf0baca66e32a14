"""A device whose numbers make times easy to check by hand."""

from dataclasses import replace

from titan_dit.planner.hardware import Device, Efficiency, Overhead

EASY = Device(
    name="easy",
    memory_gib=80.0,
    peak_tflops={"fp32": 10.0, "bf16": 100.0},
    copy_gb_per_s=1000.0,
    gpus_per_node=8,
    inner_gb_per_s={2: 50.0, 8: 100.0},
    inner_latency_us=0.0,
    nics_per_node=1,
    nic_gb_per_s=10.0,
    node_latency_us=0.0,
    launch_us=0.0,
    efficiency=Efficiency(products=1.0, attention=1.0, moved=1.0, inner=1.0, node=1.0),
    overhead=Overhead(context_mib=500.0, communicator_mib=100.0, allocator=1.0),
    error=0.1,
)
"""All efficiencies 1, no latency; 100 GB/s inside a node of 8, one NIC of 10 GB/s."""


def easy(**changes) -> Device:
    """EASY with other values; those of Efficiency by their names."""
    efficiency = {key: changes.pop(key) for key in vars(EASY.efficiency) if key in changes}
    return replace(EASY, efficiency=replace(EASY.efficiency, **efficiency), **changes)
