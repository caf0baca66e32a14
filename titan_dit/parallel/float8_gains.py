"""Which linear layers gain from float8: by measurement if there is one, else by the roofline.

A layer's training step is three matmuls of M rows, K inputs and N outputs, 2 M K N FLOPs each.
float8 halves the time of `products` (two or three) of them. The overhead is memory traffic: passes
over input, weight and output gradient, for the amax and for the casts to the matmuls' layouts. So
float8 gains if

    products x M K N / (bytes of these passes) > slowdown x FLOPs per byte of the device.

The slowdown says how much longer the compiled passes take than their bytes at the data sheet's
bandwidth. The roofline ignores launch overhead. Measurements take precedence:
`python benchmarks/float8_shapes.py` writes their table.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

TABLE = Path(__file__).with_name("float8_shapes.json")
"""Measurements: {"rows": [{device, recipe, M, K, N, bf16_ms, float8_ms}]}.

A row also records date, commit, torch and torchao, which are not read.
"""

UNIT = 16
"""Every dimension of a float8 matmul must be a multiple of this."""

BALANCE = {
    "L40S": 362 / 0.864,
    "H100 PCIe": 756 / 2.0,
    "H100 NVL": 835 / 3.9,
    "H100": 989 / 3.35,
    "H200 NVL": 835 / 4.8,
    "H200": 989 / 4.8,
    "B200": 2250 / 8.0,
}
"""Dense bf16 FLOPs per byte of memory traffic: TFLOP/s and TB/s of the vendors' data sheets."""

UNKNOWN_BALANCE = BALANCE["H100"]
"""Assumed for a device that is not in BALANCE."""


@dataclass(frozen=True)
class Cost:
    """A recipe's overhead in bytes per element, and its number of matmuls in float8."""

    input: int
    weight: int
    gradient: int
    products: int
    slowdown: float = 1.0
    """Time of the passes over that of their bytes at the data sheet's bandwidth."""


ONE_SLOWDOWN = 2.0
"""On an H200 layers break even at 420 FLOPs per byte, twice its balance: qkv of DiT-XL takes 1.00
times as long in float8, up 0.98, down 0.89 (benchmarks/results/h200-2026-11-26)."""
TWO_SLOWDOWN = 5.3
"""On the same H200 the casts of 8 layers of the 7B shape cost 329 ms of a step and save 244: they
would break even at 1.35 times their 810 FLOPs per byte. Column maxima are most of it."""
ONE_SCALE = Cost(input=6, weight=6, gradient=6, products=3, slowdown=ONE_SLOWDOWN)
"""bf16 read for the amax (2), read for the cast (2), written in two layouts (1 + 1)."""
TWO_SCALES = Cost(input=10, weight=10, gradient=10, products=3, slowdown=TWO_SLOWDOWN)
"""Rows and columns have scales of their own: read (2), cast (2 + 1), for each."""
FUSED = Cost(input=4, weight=4, gradient=4, products=3)
"""Read once (2), written in two layouts (1 + 1): the scale is known before, or per small block."""

COSTS = {
    "tensorwise": ONE_SCALE,
    "rowwise": TWO_SCALES,
    # The weight gradient stays in bf16: input and output gradient are cast in one layout only.
    "rowwise_with_gw_hp": Cost(input=5, weight=10, gradient=5, products=2, slowdown=TWO_SLOWDOWN),
    # Kernels of its own, not measured.
    "te_delayed": FUSED,
    "te_current": replace(ONE_SCALE, slowdown=1.0),
    "te_mxfp8": FUSED,
}


@dataclass(frozen=True)
class LinearShape:
    """A linear layer as one rank runs it."""

    rows: int
    """Tokens of a microbatch."""
    inputs: int
    outputs: int

    @property
    def fits(self) -> bool:
        """True if all sizes are multiples of `UNIT`, as float8 matmuls need."""
        return not any(size % UNIT for size in (self.rows, self.inputs, self.outputs))


@dataclass(frozen=True)
class Measured:
    """Measured forward and backward of one layer."""

    device: str
    recipe: str
    shape: LinearShape
    bf16_ms: float
    float8_ms: float


def read_table(path: Path = TABLE) -> list[Measured]:
    """All measurements, of all devices."""
    rows = json.loads(path.read_text())["rows"]
    return [
        Measured(
            row["device"],
            row["recipe"],
            LinearShape(row["M"], row["K"], row["N"]),
            row["bf16_ms"],
            row["float8_ms"],
        )
        for row in rows
    ]


def gains(shape: LinearShape, recipe: str, device: str, table: Sequence[Measured]) -> bool:
    """True if float8 makes the layer faster on the named device ("" without a GPU)."""
    if not shape.fits:
        return False
    near = nearest(shape, [m for m in table if (m.device, m.recipe) == (device, recipe)])
    if near is not None:
        return near.float8_ms < near.bf16_ms
    return intensity(shape, recipe) > COSTS[recipe].slowdown * balance(device)


def nearest(shape: LinearShape, measured: Sequence[Measured]) -> Measured | None:
    """The measurement with the nearest shape; None if a dimension differs by more than 2x."""

    def octaves(one: Measured) -> list[float]:
        pairs = zip(vars(one.shape).values(), vars(shape).values(), strict=True)
        return [abs(math.log2(a / b)) for a, b in pairs]

    close = [one for one in measured if max(octaves(one)) <= 1]
    return min(close, key=lambda one: sum(octaves(one)), default=None)


def intensity(shape: LinearShape, recipe: str) -> float:
    """FLOPs saved per byte of overhead."""
    cost, (m, k, n) = COSTS[recipe], (shape.rows, shape.inputs, shape.outputs)
    moved = cost.input * m * k + cost.weight * k * n + cost.gradient * m * n
    return cost.products * m * k * n / moved


def balance(device: str) -> float:
    """BALANCE by whole words of the device's name, longest match; else UNKNOWN_BALANCE.

    Whole words, because a GH200 or an H20 is not an H200.
    """
    name = f" {device} "
    known = [model for model in BALANCE if f" {model} " in name]
    return BALANCE[max(known, key=len)] if known else UNKNOWN_BALANCE
