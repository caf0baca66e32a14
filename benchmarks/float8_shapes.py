"""float8 speedup of linear layers: `python benchmarks/float8_shapes.py --write`.

Median times of forward and backward of a compiled layer (M tokens, K inputs, N outputs) in bf16 and
in float8, measured in turn with CUDA events and a full queue. `--write` stores each row at once in
titan_dit/parallel/float8_shapes.json and replaces the row of the same device, recipe and shape.
`[precision] float8_layers = "auto"` reads that table before it falls back to a roofline; the
"roofline" column shows that fallback. Shapes that run out of memory are skipped.
Needs a GPU with float8. `--emulate` is a smoke test on any device; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_queue import attempt
from meter import meter_of
from report import finish, place
from report import write as write_json
from torch import nn

from titan_dit.checks.device import check_matmuls
from titan_dit.config.layout import PrecisionConfig
from titan_dit.config.section import UserError
from titan_dit.models.dit_config import SIZES
from titan_dit.parallel import float8
from titan_dit.parallel.float8 import TABLE, LinearShape, is_faster
from titan_dit.ranks.failure import run_and_exit

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
NAME = "float8 shapes"
KEY = ("device", "recipe", "M", "K", "N")
"""Key columns of the table."""


def shapes_of(sizes: list[str], rows: list[int]) -> list[LinearShape]:
    """The four linear layers of a block of each size, for each number of tokens."""
    found = []
    for size in sizes:
        hidden = SIZES[size][0]
        for k, n in ((1, 3), (1, 1), (1, 4), (4, 1)):
            found += [LinearShape(tokens, k * hidden, n * hidden) for tokens in rows]
    return found


def step_of(
    shape: LinearShape, recipe: str, device: torch.device, emulate: bool
) -> Callable[[], None]:
    """Forward and backward of one compiled layer; recipe "bf16" disables float8."""
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


def measure(
    shape: LinearShape, recipe: str, device: torch.device, emulate: bool, turns: int
) -> tuple[float, float]:
    """Median milliseconds in (bf16, float8), measured in turn after two warm-up turns."""
    meter = meter_of(device)
    steps = [step_of(shape, kind, device, emulate) for kind in ("bf16", recipe)]
    milliseconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(turns + 2):
        # Each goes first equally often, for equal cache effects.
        for which in (turn % 2, 1 - turn % 2):
            spent = meter.call_ms(steps[which])
            if turn >= 2:
                milliseconds[which].append(spent)
    return statistics.median(milliseconds[0]), statistics.median(milliseconds[1])


def write(rows: list[dict[str, Any]], path: Path) -> None:
    """Write rows to the table; replace those of the same device, recipe and shape."""
    table = json.loads(path.read_text())["rows"] + rows
    latest = {tuple(row[key] for key in KEY): row for row in table}
    draft = path.with_name(path.name + ".part")
    lines = ",\n".join(json.dumps(row) for row in latest.values())
    draft.write_text(f'{{"rows": [\n{lines}\n]}}\n')
    draft.replace(path)


def parse() -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", default=["B", "L", "XL", "3B", "7B"], choices=SIZES)
    parser.add_argument("--rows", nargs="+", type=int, default=[4096, 16384, 65536])
    parser.add_argument("--recipes", nargs="+", default=RECIPES, choices=RECIPES)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--emulate", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--out", help="JSON")
    return parser.parse_args()


def check(options: argparse.Namespace, device: torch.device) -> None:
    """Refuse unsupported recipes and flags before the first measurement."""
    if options.write and options.emulate:
        raise UserError(
            "--write and --emulate: emulated figures mean nothing. Drop one of the flags."
        )
    for recipe in options.recipes:
        precision = PrecisionConfig(float8=recipe, float8_emulate=options.emulate)
        check_matmuls(precision, False, device)


def main() -> int:
    """Measure and report shape by shape; a failure keeps the rows measured so far."""
    options = parse()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check(options, device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    # Before the first row is written, because that makes the checkout dirty.
    where = {key: place()[key] for key in ("date", "commit", "torch")} | {"torchao": version()}
    meter, shown = meter_of(device), []
    wanted = itertools.product(options.recipes, shapes_of(options.sizes, options.rows))
    for recipe, shape in wanted:
        take = partial(times, shape, recipe, device, options.emulate, options.turns)
        row = attempt(take, meter)
        sizes = {"M": shape.rows, "K": shape.inputs, "N": shape.outputs}
        if options.write and row["result"] == "measured":
            both = {key: round(row[key], 4) for key in ("bf16_ms", "float8_ms")}
            write([{"device": name, "recipe": recipe, **sizes, **both, **where}], TABLE)
        expected = "gain" if is_faster(shape, recipe, name, []) else "loss"
        shown.append({"recipe": recipe, **sizes, **cells(row), "roofline": expected})
        print(json.dumps(shown[-1]), flush=True)
        if options.out:
            write_json(NAME, shown, options.out, torchao=where["torchao"])
    finish(NAME, shown, options.out, torchao=where["torchao"])
    if options.write:
        print(f"wrote {TABLE}")
    return int(any(row["result"].startswith("failed") for row in shown))


def times(*what: Any) -> dict[str, float]:
    """`measure` as columns of a row."""
    bf16, fast = measure(*what)
    return {"bf16_ms": bf16, "float8_ms": fast}


def cells(row: dict[str, Any]) -> dict[str, str]:
    """Printed columns of a row, with dashes if it was not measured."""
    if row["result"] != "measured":
        return dict.fromkeys(("bf16 ms", "float8 ms", "float8 / bf16"), "-") | {
            "result": row["result"]
        }
    bf16, fast = row["bf16_ms"], row["float8_ms"]
    ratio = {"float8 / bf16": f"{fast / bf16:.3f}", "result": "measured"}
    return {"bf16 ms": f"{bf16:.3f}", "float8 ms": f"{fast:.3f}", **ratio}


def version() -> str:
    """Version of torchao."""
    return importlib.metadata.version("torchao")


if __name__ == "__main__":
    run_and_exit(main)
