"""Which linear layers float8 makes faster: `python benchmarks/float8_shapes.py --write`.

Forward and backward of one compiled bf16 layer (M tokens, K inputs, N outputs) and of the same in
float8, by the device's own clock, in turn; medians. `--write` puts the rows of this device into
titan_dit/parallel/float8_shapes.json, in the place of those it had; `[precision] float8_layers =
"auto"` asks that table first. Beside each ratio stands what the roofline says without it.
Needs a GPU with float8; `--emulate` tries every line anywhere, and its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from report import finish
from torch import nn

from titan_dit.config import PrecisionConfig
from titan_dit.models.dit import SIZES
from titan_dit.parallel import float8
from titan_dit.parallel.float8_checks import check_device
from titan_dit.parallel.float8_gains import TABLE, Shape, gains

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def shapes_of(sizes: list[str], rows: list[int]) -> list[Shape]:
    """The four linears of a block of each size, for each number of tokens."""
    found = []
    for size in sizes:
        hidden = SIZES[size][0]
        for k, n in ((1, 3), (1, 1), (1, 4), (4, 1)):
            found += [Shape(tokens, k * hidden, n * hidden) for tokens in rows]
    return found


def step_of(shape: Shape, recipe: str, device: torch.device, emulate: bool) -> Callable[[], None]:
    """Forward and backward of one compiled layer; "bf16" is the one without float8."""
    torch.manual_seed(0)
    holder = nn.Sequential(nn.Linear(shape.inputs, shape.outputs, device=device))
    holder.to(torch.bfloat16)
    if recipe != "bf16":
        precision = PrecisionConfig(float8=recipe, float8_emulate=emulate)  # type: ignore[arg-type]
        float8.convert(holder, {"0": shape}, precision, shards=None)  # type: ignore[arg-type]
    kind = {"device": device, "dtype": torch.bfloat16}
    x = torch.randn(shape.rows, shape.inputs, requires_grad=True, **kind)  # type: ignore[call-overload]
    gradient = torch.randn(shape.rows, shape.outputs, **kind)  # type: ignore[call-overload]
    layer = holder if emulate else torch.compile(holder, fullgraph=True)

    def step() -> None:
        x.grad = None
        holder.zero_grad(set_to_none=True)
        layer(x).backward(gradient)

    return step


def milliseconds(step: Callable[[], None], device: torch.device) -> float:
    """One call, by the device's clock where it has one."""
    if device.type != "cuda":
        began = time.perf_counter()
        step()
        return (time.perf_counter() - began) * 1e3
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    step()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def measure(
    shape: Shape, recipe: str, device: torch.device, emulate: bool, turns: int
) -> tuple[float, float]:
    """Median milliseconds in bf16 and in float8, taken in turn after three turns to warm up."""
    steps = [step_of(shape, kind, device, emulate) for kind in ("bf16", recipe)]
    taken: list[list[float]] = [[], []]
    for turn in range(turns + 3):
        for times, step in zip(taken, steps, strict=True):
            spent = milliseconds(step, device)
            if turn >= 3:
                times.append(spent)
    torch._dynamo.reset()
    return statistics.median(taken[0]), statistics.median(taken[1])


def write(rows: list[dict[str, Any]], path: Path) -> None:
    """Put the rows of their device in the place of those that the table had."""
    device = rows[0]["device"]
    kept = [row for row in json.loads(path.read_text())["rows"] if row["device"] != device]
    path.write_text(json.dumps({"rows": kept + rows}, indent=1) + "\n")


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", default=["B", "L", "XL", "3B", "7B"], choices=SIZES)
    parser.add_argument("--rows", nargs="+", type=int, default=[4096, 16384, 65536])
    parser.add_argument("--recipes", nargs="+", default=RECIPES, choices=RECIPES)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--emulate", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--out")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    if options.write and options.emulate:
        raise SystemExit("--write: the figures of --emulate mean nothing.")
    table, shown = [], []
    for recipe in options.recipes:
        precision = PrecisionConfig(float8=recipe, float8_emulate=options.emulate)
        check_device(precision, False, device)
        for shape in shapes_of(options.sizes, options.rows):
            bf16, fast = measure(shape, recipe, device, options.emulate, options.turns)
            sizes = {"M": shape.rows, "K": shape.inputs, "N": shape.outputs}
            row = {"device": name, "recipe": recipe, **sizes}
            table.append(row | {"bf16_ms": round(bf16, 4), "float8_ms": round(fast, 4)})
            expected = "gain" if gains(shape, recipe, name, []) else "loss"
            ratio = {"float8 / bf16": f"{fast / bf16:.3f}", "roofline": expected}
            shown.append({"recipe": recipe, **sizes, "bf16 ms": f"{bf16:.3f}", **ratio})
    finish("float8 shapes", shown, options.out)
    if options.write:
        write(table, TABLE)
        print(f"wrote {TABLE}")


if __name__ == "__main__":
    main()
