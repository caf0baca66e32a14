"""Activations and CPU time by [activation_checkpoint] mode: `python benchmarks/remat.py`.

Elements per token and layer in units of h, fp32, one process: live storages after the forward of
three blocks minus those of two. Saved-tensor hooks miss what selective recomputation saves; for
compiled blocks they see everything.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from report import finish
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from titan_dit.config.layout import ActivationCheckpointConfig, CompileConfig
from titan_dit.models.base import Model
from titan_dit.models.dit_config import DiTConfig
from titan_dit.parallel import remat
from titan_dit.parallel.compile import compile_blocks

MODES = ("none", "attention", "selective", "full")


class Storages(TorchDispatchMode):
    """Weak references to the storages of all operator outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if type(tensor) is Tensor and not tensor.is_meta:
                self.add(tensor)
        return out

    def add(self, tensor: Tensor) -> Tensor:
        """Track the storage of a tensor."""
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        self.found[reference.cdata] = reference, storage.nbytes()
        return tensor

    def live_bytes(self, without: Iterable[Tensor]) -> int:
        """Bytes of live storages, except those of these tensors."""
        excluded = {StorageWeakRef(tensor.untyped_storage()).cdata for tensor in without}
        return sum(
            size
            for key, (reference, size) in self.found.items()
            if key not in excluded and not reference.expired()
        )


def blocks(
    mode: str, layers: int, hidden: int, tokens: int, *, qk_norm: bool, compiled: bool
) -> tuple[Model, tuple[Tensor, Tensor]]:
    """A model with random weights, and an input stream for its blocks."""
    config = DiTConfig(
        hidden_size=hidden,
        num_layers=layers,
        num_heads=hidden // 64,
        patch_size=2,
        latent_size=2 * round(tokens**0.5),
        in_channels=4,
        num_classes=10,
        qk_norm=qk_norm,
    )
    torch.manual_seed(0)
    model = config.build(4)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    remat.apply(model, ActivationCheckpointConfig(mode=mode))  # type: ignore[arg-type]
    compile_blocks(model, CompileConfig(enabled=compiled))
    x = torch.randn(1, tokens, hidden, requires_grad=True)
    return model, (x, torch.randn(1, hidden, requires_grad=True))


def run(model: Model, stream: tuple[Tensor, ...]) -> Tensor:
    """Run the stream through all blocks."""
    for block in model.blocks.values():
        stream = block(stream, {})
    return stream[0]


def kept(mode: str, *, hidden: int, tokens: int, qk_norm: bool, compiled: bool) -> float:
    """Saved elements per token and layer in units of `hidden`."""
    sizes = []
    for layers in (2, 3):
        model, stream = blocks(mode, layers, hidden, tokens, qk_norm=qk_norm, compiled=compiled)
        storages = Storages()
        if compiled:
            with torch.autograd.graph.saved_tensors_hooks(storages.add, lambda tensor: tensor):
                out = run(model, stream)
        else:
            with storages:
                out = run(model, stream)
        sizes.append(storages.live_bytes(model.parameters()))
        del out
    return (sizes[1] - sizes[0]) / 4 / tokens / hidden


def cpu_ratio(mode: str, turns: int, **settings: Any) -> float:
    """Median ratio of CPU time, forward and backward, to mode none."""

    def timed(step: Callable[[], None]) -> float:
        start = time.process_time()
        step()
        return time.process_time() - start

    def step_of(mode: str) -> Callable[[], None]:
        model, stream = blocks(mode, 3, **settings)
        return lambda: run(model, stream).sum().backward()

    mine, other = step_of(mode), step_of("none")
    ratios = [timed(mine) / timed(other) for _ in range(turns + 1)]
    return statistics.median(ratios[1:])


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--compiled", action="store_true", help="also measure compiled blocks")
    parser.add_argument("--out")
    options = parser.parse_args()
    rows = []
    for compiled in (False, True) if options.compiled else (False,):
        for mode in MODES:
            settings = {"hidden": options.hidden, "tokens": options.tokens, "compiled": compiled}
            ratio = cpu_ratio(mode, options.turns, qk_norm=False, **settings)
            rows.append(
                {
                    "blocks": "compiled" if compiled else "eager",
                    "mode": mode,
                    "h per token and layer": f"{kept(mode, qk_norm=False, **settings):.2f}",
                    "with qk_norm": f"{kept(mode, qk_norm=True, **settings):.2f}",
                    "CPU / none": f"{ratio:.2f}",
                }
            )
    finish(f"remat h {options.hidden} tokens {options.tokens}", rows, options.out)


if __name__ == "__main__":
    main()
