"""Joining one block of a ring on a CPU: operators and CPU time, `python benchmarks/ring_joins.py`.

Before: gradients cast to fp32 one by one; eager and compiled: parallel/ring_attention.py. At few
tokens the time is that of the host, at many that of memory. Variants are timed in turns; the
figure is the least.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from report import finish
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from titan_dit.parallel.ring_attention import EAGER, joining

Variants = Mapping[str, Callable[[], object]]


class Operators(TorchDispatchMode):
    """Counts operators that write a tensor: on a GPU, a launch each."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count and run an operator."""
        self.count += not function.is_view
        return function(*args, **(kwargs or {}))


def cast_and_add(
    dq: Tensor, more: Tensor, dk: Tensor, dv: Tensor, arrived: Tensor
) -> tuple[Tensor, Tensor]:
    """`ring_blocks.add` as it was."""
    return dq + more.float(), torch.stack((dk, dv)).float() + arrived


def variants_of(size: tuple[int, int, int, int], *, compiled: bool) -> dict[str, Variants]:
    """Ways to join outputs and gradients [b, heads, n, d] of a bf16 ring."""
    out, dq = torch.randn(2, *size)
    lse, new_lse = torch.randn(2, *size[:3])
    new_out, more, dk, dv = torch.randn(4, *size).bfloat16()
    arrived = torch.randn(2, *size)
    outputs: dict[str, Callable[[], object]] = {
        "before, eager": lambda: EAGER.merge(out, lse, new_out, new_lse)
    }
    gradients: dict[str, Callable[[], object]] = {
        "before": lambda: cast_and_add(dq, more, dk, dv, arrived),
        "eager": lambda: EAGER.add(dq, more, dk, dv, arrived),
    }
    if compiled:
        by = joining(True)
        outputs["compiled"] = lambda: by.merge(out, lse, new_out, new_lse)
        gradients["compiled"] = lambda: by.add(dq, more, dk, dv, arrived)
    return {"outputs": outputs, "gradients": gradients}


def least_us(variants: Variants, laps: int, calls: int) -> dict[str, float]:
    """Least CPU microseconds of a call of each variant, in turns."""
    found: dict[str, list[float]] = {name: [] for name in variants}
    for work in variants.values():
        work()
    for _ in range(laps):
        for name, work in variants.items():
            began = time.process_time()
            for _ in range(calls):
                work()
            found[name].append(1e6 * (time.process_time() - began) / calls)
    return {name: min(laps_us) for name, laps_us in found.items()}


def operators_of(work: Callable[[], object]) -> int:
    """Operators of a call."""
    with Operators() as counted:
        work()
    return counted.count


@torch.no_grad()
def rows(
    size: tuple[int, int, int, int], laps: int, calls: int, *, compiled: bool = True
) -> list[dict[str, Any]]:
    """One row per join and way."""
    found = []
    for join, variants in variants_of(size, compiled=compiled).items():
        us = least_us(variants, laps, calls)
        for way, work in variants.items():
            # A compiled graph runs its kernels without operators: count those of eager ones.
            operators = "fused" if way == "compiled" else operators_of(work)
            found.append({"join": join, "tokens": size[2], "way": way, "operators": operators})
            found[-1]["CPU us"] = round(us[way], 1)
    return found


def main() -> None:
    """Measure few and many tokens."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2048, help="of the larger size")
    parser.add_argument("--laps", type=int, default=10)
    parser.add_argument("--out", help="JSON file")
    options = parser.parse_args()
    few = rows((1, 2, 8, 16), options.laps, 300)
    many = rows((1, 8, options.tokens, 128), options.laps, 2)
    finish("ring joins", [*few, *many], options.out)


if __name__ == "__main__":
    main()
