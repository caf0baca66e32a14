"""Device ceilings for `gpu.py`: matrix products, a copy, attention. All data are random."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from gpu_contenders import Cell, Place
from gpu_queue import Job, Row
from meter import CALLS, Meter, copy_gb_per_s, gemm_tflops
from torch import Tensor

from titan_dit.commands import bench_attention
from titan_dit.config.section import UserError
from titan_dit.kernels import attention
from titan_dit.kernels.attention_choice import AttentionShape
from titan_dit.observe.meter import peak_tflops

BACKENDS = ("auto", "flash", "cudnn")
"""`auto` is the default of a step; its rows name the kernel that it took."""
RING = 4
"""Ranks of a ring, of which one is measured."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurements."""

    gemm: int
    """Rows and columns of the square product."""
    copy: int
    """Bytes."""
    laps: int
    tokens: tuple[int, ...]
    """Tokens per sample of attention; a batch has as many tokens as the largest."""
    heads: int
    head_dims: tuple[int, ...]
    ring: tuple[int, int]
    """Tokens per sample and head dim of the ring."""


FULL = Sizes(8192, 2**30, 100, (256, 1024, 4096, 16384, 65536), 16, (128, 72, 64), (16384, 128))
TINY = Sizes(64, 2**16, 4, (16, 64), 2, (16,), (64, 16))


def jobs(cells: Sequence[Cell], place: Place, tiny: bool) -> list[Job]:
    """One job per ceiling; a row's `ceilings` are added to those of the report."""
    sizes = TINY if tiny else FULL
    device, meter = place.device, place.meter
    peak = peak_tflops(device, "bf16")

    def of(name: str, estimate_s: float, find: Callable[[], dict[str, Any]]) -> Job:
        return Job(key={"ceiling": name}, estimate_s=estimate_s, take=lambda: {"ceilings": find()})

    def gemm() -> dict[str, Any]:
        return {"gemm_tflops": gemm_tflops(meter, device, sizes.gemm, sizes.laps)}

    def copy() -> dict[str, Any]:
        return {"copy_gb_per_s": copy_gb_per_s(meter, device, sizes.copy, sizes.laps)}

    def shapes() -> dict[str, Any]:
        return {"gemm_shapes": [products(place, *shape) for shape in shapes_of(cells)]}

    def attention_of(head_dim: int) -> dict[str, Any]:
        rows = list(attention_rows(place, sizes, head_dim, peak))
        if not rows:
            raise UserError(f"no attention kernel supports {head_dim} channels in bf16")
        return {"attention": rows}

    first, *others = (
        of(f"attention of {head_dim} channels", 12, partial(attention_of, head_dim))
        for head_dim in sizes.head_dims
    )
    ring = of(
        f"attention in a ring of {RING}",
        15,
        lambda: {"attention": list(ring_rows(place, sizes))},
    )
    return [
        first,
        ring,
        of("bf16 product", 4, gemm),
        of("copy", 3, copy),
        *others,
        of("products of the models", 10, shapes),
    ]


def shapes_of(cells: Sequence[Cell]) -> list[tuple[int, int, int]]:
    """Distinct (tokens, inputs, outputs) of the linear layers of the cells' blocks."""
    found = []
    for cell in cells:
        hidden, ffn = cell.config.shape[0], cell.config.ffn
        rows = cell.batch * cell.config.token_shape[0]
        pairs = (hidden, 3 * hidden), (hidden, hidden), (hidden, ffn), (ffn, hidden)
        found += [(rows, k, n) for k, n in pairs]
    return list(dict.fromkeys(found))


def products(place: Place, rows: int, inputs: int, outputs: int) -> Row:
    """TFLOP/s of the three products of a linear layer, in the memory layouts of nn.Linear."""
    device, meter = place.device, place.meter

    def draw(*size: int) -> Tensor:
        return torch.randn(size, device=device, dtype=torch.bfloat16)

    x, weight, gradient = draw(rows, inputs), draw(outputs, inputs), draw(rows, outputs)
    factors = {
        "forward": (x, weight.t()),
        "gradient of input": (gradient, weight),
        "gradient of weight": (gradient.t(), x),
    }
    flops = 2 * rows * inputs * outputs
    ms = {name: product_ms(meter, *pair) for name, pair in factors.items()}
    found = {name: flops / taken / 1e9 for name, taken in ms.items()}
    size = {"M": rows, "K": inputs, "N": outputs}
    return {**size, **found, "all": 3 * flops / sum(ms.values()) / 1e9}


def product_ms(meter: Meter, a: Tensor, b: Tensor) -> float:
    """Median milliseconds of one product."""
    out = torch.empty(a.shape[0], b.shape[1], device=a.device, dtype=a.dtype)

    def lap() -> None:
        for _ in range(CALLS):
            torch.mm(a, b, out=out)

    meter.laps_ms(lap, 1)
    return statistics.median(meter.laps_ms(lap, 5)) / CALLS


def attention_rows(
    place: Place, sizes: Sizes, head_dim: int, peak: float | None
) -> Iterator[dict[str, Any]]:
    """Rows of `bench attention` of every supported kernel, by ascending tokens."""
    for tokens in sizes.tokens:
        batch = max(sizes.tokens) // tokens
        shape = AttentionShape(sizes.heads, tokens, head_dim, torch.bfloat16, place.device)
        flops = 12 * batch * sizes.heads * tokens**2 * head_dim
        # A fifth of a second each, at half of the data sheet's peak.
        laps = 3 if peak is None else min(20, max(3, round(0.2 / (flops / peak / 0.5e12))))
        for name in BACKENDS:
            if attention.refusal(name, shape) is None:
                row = bench_attention.row(name, shape, batch, laps)
                yield {"head_dim": head_dim, "heads": sizes.heads, "batch": batch, **row}
            place.meter.release()
    attention.use_implementation("auto")


def ring_rows(place: Place, sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Rows for one rank of a ring; joins are eager and, with auto, compiled."""
    tokens, head_dim = sizes.ring
    shape = AttentionShape(
        sizes.heads, tokens // RING, head_dim, torch.bfloat16, place.device, ring=True
    )
    for name in BACKENDS:
        for compiled in (False, True) if name == "auto" else (False,):
            if attention.refusal(name, shape) is None:
                row = bench_attention.row(name, shape, RING, 5, RING, compiled)
                yield {"head_dim": head_dim, "heads": sizes.heads, "batch": RING, **row}
            place.meter.release()


def gemm_table(ceilings: dict[str, Any]) -> list[Row]:
    """Printed table of the products of the models' layers."""
    rows = ceilings.get("gemm_shapes", [])
    return [{k: v if isinstance(v, int) else f"{v:.3g}" for k, v in row.items()} for row in rows]


def attention_table(ceilings: dict[str, Any]) -> list[Row]:
    """Printed table of attention: TFLOP/s of every kernel by shape; a ring's joins if compiled."""
    rows = ceilings["attention"]
    keys = [(row["head_dim"], row["tokens"], row["ring"], row["compiled"]) for row in rows]
    lines = []
    for key in dict.fromkeys(keys):
        here = {row["backend"]: row for row, of in zip(rows, keys, strict=True) if of == key}
        line: Row = dict(zip(("channels", "tokens", "ring", "compiled joins"), key, strict=True))
        line |= {name: tflops(here.get(name)) for name in BACKENDS}
        lines.append(line | {"auto took": here.get("auto", {}).get("kernel", "-")})
    return lines


def tflops(row: Row | None) -> str:
    """Forward / backward / both, in model TFLOP/s."""
    if row is None:
        return "-"
    if "both ms" not in row:
        return str(row["error"])
    return " / ".join(f"{row[f'{name} TFLOP/s']:.3g}" for name in ("forward", "backward", "both"))
