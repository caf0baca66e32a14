r"""The limit of a training step from a device's ceilings, beside what was measured.

    python benchmarks/roofline.py --gpu gpu.json
    python benchmarks/roofline.py --size 7B/2 --cells 64:8 --gemm-tflops 700 --copy-tbs 4 \
        --dp-shard 64 --tp 4 --link-gbs 40 --inner-gbs 350

The first takes ceilings, models and measured rows from the JSON of gpu.py; flags go before. The
second needs no device at all. Formulas: docs/roofline.md. Times in ms.
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
from shapes import shape_of

from titan_dit import catalog
from titan_dit.failure import guarded
from titan_dit.models.dit import DiTConfig
from titan_dit.section import UserError

SHAPE = ("size", "hidden", "layers", "heads", "patch")
AXES = ("dp_replicate", "dp_shard", "tp", "cp")
TITLE = r"gpu DiT-(\w+/\d) \S+ (\w+)"
"""Of a JSON whose rows name no model: one for all."""


def parse() -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", type=Path, help="JSON of gpu.py: ceilings, models and rows")
    parser.add_argument("--gemm-tflops", type=float, help="of a large bf16 product")
    parser.add_argument("--copy-tbs", type=float, help="TB/s of a copy, read + written")
    parser.add_argument(
        "--attention-tflops", type=float, help="default: measured by gpu.py, or else the product's"
    )
    parser.add_argument("--peak-tflops", type=float, help="of the data sheet, for MFU")
    parser.add_argument("--link-gbs", type=float, help="GB/s that a rank sends along dp_*")
    parser.add_argument("--inner-gbs", type=float, help="the same along tp and cp")
    parser.add_argument("--size", help='such as "XL/2"; or the four numbers:')
    for name in SHAPE[1:]:
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--mlp-ratio", type=float, default=4.0)
    parser.add_argument("--qk-norm", action="store_true")
    parser.add_argument("--channels", type=int, default=4)
    parser.add_argument("--objective", help="rectified_flow, or ddpm, which learns sigma, too")
    parser.add_argument("--cells", nargs="+", help="latent size:samples of a rank, such as 32:256")
    parser.add_argument("--eager", action="store_true", help="blocks that are not compiled")
    parser.add_argument(
        "--remat", default="none", choices=["none", "attention", "selective", "full"]
    )
    parser.add_argument("--microbatches", type=int, default=1, help="of a rank and step")
    parser.add_argument("--averages", type=int, default=1, help="EMA decays")
    parser.add_argument("--cp-method", default="ring", choices=["ring", "ulysses"])
    for axis in AXES:
        parser.add_argument(f"--{axis.replace('_', '-')}", type=int, default=1)
    parser.add_argument("--out", help="JSON")
    return parser.parse_args()


def read(path: Path | None) -> dict[str, Any]:
    """What gpu.py wrote, or nothing."""
    if path is None:
        return {}
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"--gpu {path} cannot be read as JSON: {error}") from error
    has_models = bool(found.get("rows")) and all("model" in row for row in found["rows"])
    if not has_models and not re.match(TITLE, found.get("benchmark", "")):
        raise UserError(
            f"--gpu {path} is not what benchmarks/gpu.py --out writes for a model of a named size."
        )
    return found


def ceilings_of(options: argparse.Namespace, gpu: dict[str, Any]) -> Ceilings:
    """Flags before what was measured."""
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
    """Measured with the same head dim at the nearest number of tokens, by the faster kernel.

    None where there is no such measurement, or none within a factor of 2 of the tokens.
    """
    head_dim, tokens = config.shape[0] // config.num_heads, config.token_shape[0]
    rows = gpu.get("ceilings", {}).get("attention", [])
    near = [
        (abs(math.log2(row["tokens"] / tokens)), -row["both TFLOP/s"])
        for row in rows
        if row["head_dim"] == head_dim and "both TFLOP/s" in row
    ]
    octaves, tflops = min(near, default=(math.inf, 0))
    return -tflops if octaves <= 1 else None


def work_of(
    options: argparse.Namespace, gpu: dict[str, Any], model: str | None, latent: int, batch: int
) -> Work:
    """A step of one cell; its model unless the flags name one."""
    title = re.match(TITLE, gpu.get("benchmark", ""))
    shape: dict[str, Any] = {name: getattr(options, name) for name in SHAPE}
    model = model or (title[1] if title else None)
    if model and not any(shape.values()):
        shape = shape_of(model)
    config = DiTConfig(
        **shape,
        mlp_ratio=options.mlp_ratio,
        latent_size=latent,
        channels=options.channels,
        num_classes=1000,
        qk_norm=options.qk_norm,
    )
    told = gpu.get("objective") or (title[2] if title else "rectified_flow")
    objective = options.objective or told
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
    """(contender, its measured ms, its work): the cells of the flags, or the rows of gpu.py."""
    if options.cells or not gpu:
        for text in options.cells or ["32:256"]:
            if not re.fullmatch(r"\d+:\d+", text):
                raise UserError(f"--cells {text} is no latent size:samples, such as 32:256.")
            yield "", None, work_of(options, gpu, None, *map(int, text.split(":")))
        return
    for row in gpu["rows"]:
        name = row["contender"]
        # Why nothing was measured; what is faster than the ceilings, which are those of bf16.
        if not re.fullmatch(r"[\d.]+", row["ms per step"]) or "float8" in name:
            continue
        # Any patch divides 8: the shape says which one it is.
        work = work_of(options, gpu, row.get("model"), 8, row["batch"])
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
        raise UserError(f"--gpu {options.gpu} has no measured row.")
    # What no row has any of needs no column.
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
    guarded(main)
