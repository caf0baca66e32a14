"""CPU time of an optimizer's step on the parameters of XL, sharded by FSDP2 on one rank.

    python benchmarks/optimizers.py                 Python's share: XL's 28 layers at width 16
    python benchmarks/optimizers.py --hidden 384 --layers 12 --heads 6      S/2's matrices

The contenders take turns. adamw_dtensors is torch's AdamW on DTensors.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from titan_dit.models.dit_config import DiTConfig
from titan_dit.optim.optimizer import OptimizerConfig, apply_gradients, build_optimizer
from titan_dit.optim.sections import AdamWConfig, MuonConfig
from titan_dit.parallel.mesh import AxisSizes, Mesh
from titan_dit.ranks import process_group

GO = torch.tensor(False)
SPEC = DiTConfig(size="XL/2", latent_size=32, in_channels=4, num_classes=1000).spec()
Parameters = dict[str, nn.Parameter]


def dtensors(parameters: Parameters) -> Callable[[], None]:
    """The fused AdamW of torch, on DTensors."""
    adamw = torch.optim.AdamW(parameters.values(), fused=True)

    def step() -> None:
        adamw.found_inf = GO.float()  # type: ignore[attr-defined]
        adamw.step()
        adamw.zero_grad()

    return step


def ours(config: OptimizerConfig) -> Callable[[Parameters], Callable[[], None]]:
    """An optimizer of titan_dit."""

    def make(parameters: Parameters) -> Callable[[], None]:
        optimizer = build_optimizer(parameters, config, SPEC)
        return lambda: apply_gradients(optimizer, config.lr, GO)

    return make


CONTENDERS = {
    "adamw_dtensors": dtensors,
    "adamw": ours(AdamWConfig()),
    "muon": ours(MuonConfig(fused_qkv=())),
    "muon_fp32": ours(MuonConfig(fused_qkv=(), ns_dtype="fp32")),
}


def parameters_of(config: DiTConfig, mesh: Mesh) -> Parameters:
    """A DiT's parameters, sharded block by block."""
    model = config.spec().build()
    for block in model.get_submodule("blocks").children():
        fully_shard(block, mesh=mesh.fsdp)
    fully_shard(model, mesh=mesh.fsdp)
    return dict(model.named_parameters())


def cpu_ms(step: Callable[[], None], parameters: Parameters, gradients: list[Tensor]) -> float:
    """CPU time of one step."""
    for parameter, gradient in zip(parameters.values(), gradients, strict=True):
        parameter.grad = gradient.clone()
    began = time.process_time()
    step()
    return 1e3 * (time.process_time() - began)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=16)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    config = DiTConfig(
        hidden_size=options.hidden,
        num_layers=options.layers,
        num_heads=options.heads,
        patch_size=2,
        latent_size=4,
        in_channels=4,
        num_classes=10,
    )
    with process_group.start("cpu"):
        mesh = Mesh(AxisSizes(), "cpu")
        sides = {}
        for name, make in CONTENDERS.items():
            parameters = parameters_of(config, mesh)
            gradients = [torch.randn_like(p) for p in parameters.values()]
            sides[name] = make(parameters), parameters, gradients
        times: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(options.steps + 2):
            for name, side in sides.items():
                times[name].append(cpu_ms(*side))
    for name, values in times.items():
        measured = values[2:]
        median, least = statistics.median(measured), min(measured)
        sys.stdout.write(f"{name:<16}{median:9.2f} ms a step (least {least:.2f})\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
