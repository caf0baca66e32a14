"""One product for all layers' modulations against one per layer: `python benchmarks/modulation.py`.

Every layer maps the condition [b, h] to six shifts, scales and gates: products of few rows, forward
and backward. Parameters are per layer, for sharding and checkpoints, so a single product has to
concatenate them first. "joined before" is the limit, with concatenated parameters. A GPU is timed
with a full queue, as in training.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from meter import meter_of
from report import finish
from torch import Tensor

from titan_dit.models.dit_config import SIZES


def layer_by_layer(condition: Tensor, weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
    """One product per layer, as in the model."""
    return [F.linear(condition, w, b) for w, b in zip(weights, biases, strict=True)]


def one_product(condition: Tensor, weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
    """Concatenate the weights of all layers, then one product."""
    return [*F.linear(condition, torch.cat(weights), torch.cat(biases)).chunk(len(weights), -1)]


def joined_before(condition: Tensor, weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
    """One product with weights that are concatenated beforehand."""
    return [F.linear(condition, weights[0], biases[0])]


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", default=["S", "B", "XL"], choices=list(SIZES))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--out")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = []
    for size in options.sizes:
        hidden, layers, _ = SIZES[size]
        turns = measure(hidden, layers, options.batch, device, options.turns)
        base = turns["layer by layer"]
        row: dict[str, object] = {"size": size, "layers": layers}
        for name, times in turns.items():
            row[f"{name}, ms"] = f"{statistics.median(times):.3f}"
            ratios = [mine / other for mine, other in zip(times, base, strict=True)]
            row[f"{name}, ratio"] = f"{statistics.median(ratios):.2f}"
        rows.append(row)
    finish(f"modulation bf16 batch {options.batch}", rows, options.out)


def measure(
    hidden: int, layers: int, batch: int, device: torch.device, turns: int
) -> dict[str, list[float]]:
    """Milliseconds of forward and backward of each variant, by turn."""
    draw = {"device": device, "dtype": torch.bfloat16, "requires_grad": True}
    condition = torch.randn(batch, hidden, **draw)  # type: ignore[call-overload]
    wide = 6 * hidden

    def parameters(count: int, rows: int) -> tuple[list[Tensor], list[Tensor]]:
        made = (torch.randn(rows, hidden, **draw) for _ in range(count))  # type: ignore[call-overload]
        return list(made), [torch.zeros(rows, **draw) for _ in range(count)]  # type: ignore[call-overload]

    apart, joined = parameters(layers, wide), parameters(1, layers * wide)
    ways: dict[str, Callable[[], object]] = {
        "layer by layer": step_of(layer_by_layer, condition, *apart),
        "one product": step_of(one_product, condition, *apart),
        "joined before": step_of(joined_before, condition, *joined),
    }
    meter, times = meter_of(device), {name: [] for name in ways}  # type: dict[str, list[float]]
    names = list(ways)
    for turn in range(turns + 1):
        # Each goes first equally often, for equal cache effects.
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            spent = meter.call_ms(ways[name])
            if turn:
                times[name].append(spent)
    return times


def step_of(
    way: Callable[[Tensor, list[Tensor], list[Tensor]], list[Tensor]],
    condition: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
) -> Callable[[], object]:
    """Forward and backward with all gradients."""

    def step() -> object:
        outs = way(condition, weights, biases)
        return torch.autograd.grad(
            outs, [condition, *weights, *biases], [torch.ones_like(out) for out in outs]
        )

    return step


if __name__ == "__main__":
    main()
