"""Which linear layers gain from float8: measured where they were, by the roofline elsewhere.

A layer's training step is three products of M rows, K inputs and N outputs, 2 M K N FLOPs each, of
which float8 halves the time of two or three. It pays for that with passes over the memory of
input, weight and output gradient: their largest values, and their casts in the layouts that the
products want. So float8 gains where

    products x M K N / (bytes of input, weight and gradient) > FLOPs per byte of the device.

That leaves out launches and what a kernel misses of its peak, on either side of the comparison:
`python benchmarks/float8_shapes.py` measures, and writes the table that is asked first.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TABLE = Path(__file__).with_name("float8_shapes.json")
"""What the benchmark has measured: {"rows": [{device, recipe, M, K, N, bf16_ms, float8_ms}]}.

A row also says when and where it was measured (date, commit, torch, torchao): for people only.
"""

UNIT = 16
"""The tensor cores' float8 products want every dimension in multiples of this."""

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
"""Of a device that is not in BALANCE."""


@dataclass(frozen=True)
class Cost:
    """What a recipe moves, in bytes per element, for how many products at twice the speed."""

    input: int
    weight: int
    gradient: int
    products: int


ONE_SCALE = Cost(input=6, weight=6, gradient=6, products=3)
"""bf16 read for the largest value (2), read for the cast (2), written in two layouts (1 + 1)."""
TWO_SCALES = Cost(input=10, weight=10, gradient=10, products=3)
"""Rows and columns have scales of their own: read (2), cast (2 + 1), for each."""
FUSED = Cost(input=4, weight=4, gradient=4, products=3)
"""Read once (2), written in two layouts (1 + 1): the scale is known, or that of a small block."""

COSTS = {
    "tensorwise": ONE_SCALE,
    "rowwise": TWO_SCALES,
    # The weight's gradient stays in bf16: the input and the gradient are cast one way only.
    "rowwise_with_gw_hp": Cost(input=5, weight=10, gradient=5, products=2),
    "te_delayed": FUSED,
    "te_current": ONE_SCALE,
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
        """Whether a device can multiply it at all."""
        return not any(size % UNIT for size in (self.rows, self.inputs, self.outputs))


@dataclass(frozen=True)
class Measured:
    """Forward and backward of one layer."""

    device: str
    recipe: str
    shape: LinearShape
    bf16_ms: float
    float8_ms: float


def read_table(path: Path = TABLE) -> list[Measured]:
    """What was measured, on all devices."""
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
    """Whether float8 makes the layer faster on the device of that name ("" if there is none)."""
    if not shape.fits:
        return False
    near = nearest(shape, [m for m in table if (m.device, m.recipe) == (device, recipe)])
    if near is not None:
        return near.float8_ms < near.bf16_ms
    return intensity(shape, recipe) > balance(device)


def nearest(shape: LinearShape, measured: Sequence[Measured]) -> Measured | None:
    """The shape most like this one, if none of its dimensions is off by more than a factor of 2."""

    def octaves(one: Measured) -> list[float]:
        pairs = zip(vars(one.shape).values(), vars(shape).values(), strict=True)
        return [abs(math.log2(a / b)) for a, b in pairs]

    close = [one for one in measured if max(octaves(one)) <= 1]
    return min(close, key=lambda one: sum(octaves(one)), default=None)


def intensity(shape: LinearShape, recipe: str) -> float:
    """FLOPs saved per byte moved for it."""
    cost, (m, k, n) = COSTS[recipe], (shape.rows, shape.inputs, shape.outputs)
    moved = cost.input * m * k + cost.weight * k * n + cost.gradient * m * n
    return cost.products * m * k * n / moved


def balance(device: str) -> float:
    """BALANCE by whole words of the device's name, the longest match first; else UNKNOWN_BALANCE.

    Whole words: a GH200 has other memory than an H200, and an H20 is another GPU.
    """
    name = f" {device} "
    known = [model for model in BALANCE if f" {model} " in name]
    return BALANCE[max(known, key=len)] if known else UNKNOWN_BALANCE
