r"""Roofline of a training step from a device's ceilings, against measured steps.

    python benchmarks/roofline.py --gpu gpu.json
    python benchmarks/roofline.py --size 7B/2 --cells 64:8 --gemm-tflops 700 --copy-tbs 4 \
        --dp-shard 64 --tp 4 --link-gbs 40 --inner-gbs 350

The first takes ceilings, models and measured rows from the JSON of gpu.py; flags override them. The
second needs no device. Formulas: docs/roofline.md. Times are in ms.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from limits import Ceilings, Work, mfu, terms_ms
from report import finish
from shapes import parse_cell, shape_of

from titan_dit.config import catalog
from titan_dit.config.section import UserError
from titan_dit.models.dit_config import DiTConfig
from titan_dit.ranks.failure import run_and_exit

SHAPE = {
    "size": "size",
    "hidden": "hidden_size",
    "layers": "num_layers",
    "heads": "num_heads",
    "patch": "patch_size",
}
"""Flag -> argument of DiTConfig."""
AXES = ("dp_replicate", "dp_shard", "tp", "cp")


def parse() -> argparse.Namespace:
    """Command-line flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", type=Path, help="JSON of gpu.py: ceilings, models and rows")
    parser.add_argument("--gemm-tflops", type=float, help="TFLOP/s of a large bf16 product")
    parser.add_argument("--copy-tbs", type=float, help="TB/s of a copy, read + written")
    parser.add_argument(
        "--attention-tflops", type=float, help="default: measured by gpu.py, else --gemm-tflops"
    )
    parser.add_argument("--peak-tflops", type=float, help="data sheet peak, for MFU")
    parser.add_argument("--link-gbs", type=float, help="GB/s per rank along dp_*")
    parser.add_argument("--inner-gbs", type=float, help="GB/s per rank along tp and cp")
    parser.add_argument("--size", help="model of cells without one (XL/2), or:")
    for name in list(SHAPE)[1:]:
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--mlp-ratio", type=float, default=4.0)
    parser.add_argument("--qk-norm", action="store_true")
    parser.add_argument("--channels", type=int, default=4)
    parser.add_argument("--objective", help="rectified_flow, or ddpm (with learned sigma)")
    parser.add_argument(
        "--cells", nargs="+", help="[model:]latent size:samples per rank, 32:256 or XL/2:64:8"
    )
    parser.add_argument("--eager", action="store_true", help="without compiled blocks")
    parser.add_argument(
        "--remat", default="none", choices=["none", "attention", "selective", "full"]
    )
    parser.add_argument("--microbatches", type=int, default=1, help="per rank and step")
    parser.add_argument("--averages", type=int, default=1, help="number of EMA decays")
    parser.add_argument("--cp-method", default="ring", choices=["ring", "ulysses"])
    for axis in AXES:
        parser.add_argument(f"--{axis.replace('_', '-')}", type=int, default=1)
    parser.add_argument("--out", help="JSON")
    return parser.parse_args()


def read(path: Path | None) -> dict[str, Any]:
    """The JSON of gpu.py, or an empty dict."""
    if path is None:
        return {}
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"--gpu {path} cannot be read as JSON: {error}") from error
    if "ceilings" not in found or not all("model" in row for row in found["rows"]):
        raise UserError(
            f"--gpu {path} lacks ceilings, or the model of a row. Give a JSON file that "
            "benchmarks/gpu.py --out wrote."
        )
    return found


def ceilings_of(options: argparse.Namespace, gpu: dict[str, Any]) -> Ceilings:
    """Ceilings from the flags, else from gpu.py."""
    measured = gpu.get("ceilings", {})
    copy = options.copy_tbs * 1e3 if options.copy_tbs else measured.get("copy_gb_per_s")
    gemm = options.gemm_tflops or measured.get("gemm_tflops")
    if not gemm or not copy:
        raise UserError("No ceilings. Give --gpu gpu.json, or --gemm-tflops and --copy-tbs.")
    return Ceilings(
        gemm_tflops=gemm,
        copy_gb_per_s=copy,
        attention_tflops=options.attention_tflops,
        peak_tflops=options.peak_tflops or measured.get("peak_tflops"),
        link_gb_per_s=options.link_gbs,
        inner_gb_per_s=options.inner_gbs,
    )


def attention_tflops(gpu: dict[str, Any], config: DiTConfig) -> float | None:
    """Measured attention TFLOP/s with the same head dim at the nearest tokens, faster kernel.

    None without a measurement within a factor of 2 of the tokens.
    """
    hidden, _, heads, _ = config.shape
    head_dim, tokens = hidden // heads, config.token_shape[0]
    rows = gpu.get("ceilings", {}).get("attention", [])
    near = [
        (abs(math.log2(row["tokens"] / tokens)), -row["both TFLOP/s"])
        for row in rows
        if row["head_dim"] == head_dim and "both TFLOP/s" in row and row.get("ring", 1) == 1
    ]
    octaves, tflops = min(near, default=(math.inf, 0))
    return -tflops if octaves <= 1 else None


def flags_shape(options: argparse.Namespace) -> dict[str, Any] | None:
    """Model shape of the flags, or None."""
    shape: dict[str, Any] = {argument: getattr(options, flag) for flag, argument in SHAPE.items()}
    return shape if any(shape.values()) else None


def cell_of(options: argparse.Namespace, text: str) -> tuple[dict[str, Any], int, int]:
    """(model shape, latent size, batch) of a cell; its model defaults to the flags."""
    model, latent, batch = parse_cell(text, "")
    shape = shape_of(model) if model else flags_shape(options)
    if shape is None:
        raise UserError(
            f"--cells {text} names no model. Give --size XL/2, or --hidden, --layers, --heads and "
            f"--patch, or --cells XL/2:{text}."
        )
    return shape, latent, batch


def work_of(
    options: argparse.Namespace,
    gpu: dict[str, Any],
    shape: dict[str, Any],
    latent: int,
    batch: int,
) -> Work:
    """The work of one cell."""
    config = DiTConfig(
        **shape,
        mlp_ratio=options.mlp_ratio,
        latent_size=latent,
        in_channels=options.channels,
        num_classes=1000,
        qk_norm=options.qk_norm,
    )
    objective = options.objective or gpu.get("objective", "rectified_flow")
    learned: Any = catalog.variant("objective", objective)()
    return Work(
        config,
        learned.output_channels(options.channels),
        batch,
        is_compiled=not options.eager,
        remat=options.remat,
        microbatches=options.microbatches,
        num_averages=options.averages,
        sizes={axis: getattr(options, axis) for axis in AXES},
        cp_method=options.cp_method,
    )


def works(
    options: argparse.Namespace, gpu: dict[str, Any]
) -> Iterator[tuple[str, float | None, Work]]:
    """(contender, measured ms, work) of the cells of the flags, or of the rows of gpu.py."""
    if options.cells or not gpu:
        for text in options.cells or ["32:256"]:
            yield "", None, work_of(options, gpu, *cell_of(options, text))
        return
    for row in gpu["rows"]:
        name = row["contender"]
        # Skip rows without a measurement, and float8, which exceeds the bf16 ceilings.
        if not re.fullmatch(r"[\d.]+", row["ms per step"]) or "float8" in name:
            continue
        # 8 is a placeholder that every patch size divides; it is replaced below.
        shape = flags_shape(options) or shape_of(row["model"])
        work = work_of(options, gpu, shape, 8, row["batch"])
        latent = work.config.shape[3] * round(row["tokens"] ** 0.5)
        work = replace(work, config=replace(work.config, latent_size=latent))
        yield name, float(row["ms per step"]), replace(work, is_compiled="compiled" in name)


def compared(
    name: str, measured_ms: float | None, work: Work, ceilings: Ceilings
) -> dict[str, str]:
    """One row of the table."""
    terms = terms_ms(work, ceilings)
    step = terms.pop("step")
    row = {"h x layers": "{} x {}".format(*work.config.shape[:2])}
    row |= {"tokens": str(work.config.token_shape[0]), "batch": str(work.batch)}
    row |= {"contender": name} if name else {}
    row |= {term: f"{ms:.2f}" for term, ms in terms.items()}
    best = mfu(work, ceilings, step)
    row |= {"limit": f"{step:.1f}", "MFU at most": f"{best:.3f}" if best else "-"}
    if measured_ms is not None:
        reached = mfu(work, ceilings, measured_ms)
        row |= {
            "measured": f"{measured_ms:.1f}",
            "MFU": f"{reached:.3f}" if reached else "-",
            "limit / measured": f"{step / measured_ms:.3f}",
        }
    return row


def main() -> None:
    """Compute and report."""
    options = parse()
    gpu = read(options.gpu)
    ceilings = ceilings_of(options, gpu)
    rows = []
    for name, measured_ms, work in works(options, gpu):
        attention = options.attention_tflops or attention_tflops(gpu, work.config)
        mine = replace(ceilings, attention_tflops=attention)
        rows.append(compared(name, measured_ms, work, mine))
    if not rows:
        raise UserError(f"--gpu {options.gpu} has no measured row. Give --cells.")
    # Drop columns that are zero in every row.
    empty = [key for key in rows[0] if all(row[key] == "0.00" for row in rows)]
    rows = [{key: value for key, value in row.items() if key not in empty} for row in rows]
    print(
        f"ceilings: {ceilings.gemm_tflops:.4g} TFLOP/s GEMM, {ceilings.copy_gb_per_s:.4g} GB/s "
        f"copy, attention {ceilings.attention_tflops or 'as measured, or as GEMM'}"
    )
    if gpu:
        print(f"measured: {gpu.get('device')}, commit {gpu.get('commit')}, {gpu.get('date')}")
    finish("roofline", rows, options.out, ceilings=vars(ceilings))


if __name__ == "__main__":
    run_and_exit(main)
