"""Bytes that a rank sends along each mesh axis, against theory: `python benchmarks/collectives.py`.

One process: a dry run takes the step on fake tensors and counts the traffic of its operators. The
formulas are those of docs/parallelism.md. Traffic per layer is the difference between two depths,
which cancels embedding and head. For a pipeline all messages are compared.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from report import finish

from titan_dit.config import catalog, config_file
from titan_dit.dry_run.fake_step import take_fake_step
from titan_dit.plan import resolve

LAYERS = 2
HIDDEN, HEADS, PATCH, LATENT = 128, 8, 2, 16
BATCH, MICROBATCHES = 8, 4
"""Samples and microbatches per data-parallel rank and step."""

BF16, FP32 = 2, 4
"""Bytes per element: parameters and activations are sent in bf16, parameter gradients in fp32."""


@dataclass(frozen=True)
class Shape:
    """Symbols of the formulas, for one rank."""

    b: int
    s: int
    h: int
    parameters: int
    """Parameters of one layer."""


S = Shape(
    b=BATCH,
    s=(LATENT // PATCH) ** 2,
    h=HIDDEN,
    # qkv, out, up, down and modulation: (3 + 1 + 4 + 4 + 6) h^2, plus biases.
    parameters=18 * HIDDEN**2 + 15 * HIDDEN,
)


@dataclass(frozen=True)
class Case:
    """A layout that uses one axis, and its expected traffic."""

    axis: str
    ranks: int
    sections: dict[str, dict[str, Any]]
    formula: str
    """In elements; P is the parameters of a layer."""
    theory: Callable[[int], float]
    """Ranks of the axis -> bytes."""
    also: int = 1
    """Ranks of other axes."""
    is_whole: bool = False
    """True for the whole traffic of the axis instead of that per layer."""


def fsdp(gathers: int) -> Callable[[int], float]:
    """All-gathers of parameters, and one reduce-scatter of their gradients."""
    return lambda d: (gathers * BF16 + FP32) * S.parameters * (d - 1) / d


def replicas(shard: int) -> Callable[[int], float]:
    """All-reduce of a shard's gradients."""
    return lambda r: 2 * (r - 1) / r * FP32 * S.parameters / shard


def tensor(t: int) -> float:
    """Four all-gathers and four reduce-scatters of tokens; six modulation vectors once."""
    return (t - 1) / t * S.b * S.h * (8 * S.s + 12) * BF16


def replicated_tokens(t: int) -> float:
    """Elements sent without sequence parallelism, where modulation gradients are complete."""
    return (t - 1) / t * S.b * S.h * (8 * S.s + 6) * BF16


def ring(c: int) -> float:
    """Keys and values forward and backward, their gradients in fp32."""
    return (c - 1) / c * S.b * S.s * S.h * (4 * BF16 + 2 * FP32)


def ulysses(c: int) -> float:
    """All-to-alls of q, k, v and the output, forward and backward."""
    return 8 * (c - 1) / c**2 * S.b * S.s * S.h * BF16


def messages(p: int) -> float:
    """Tokens and condition forward, their gradients backward, at every stage boundary."""
    return 2 * (p - 1) * S.b * (S.s + 1) * S.h * BF16


def parallel(**keys: Any) -> dict[str, dict[str, Any]]:
    """Config sections with these keys of [parallel]."""
    return {"parallel": keys}


ONE = {"training": {"microbatch_size": BATCH}}
MANY = {"training": {"microbatch_size": BATCH // MICROBATCHES}}
NEVER, ALWAYS = (parallel(reshard_after_forward=when) for when in ("never", "always"))

CASES = (
    Case("dp_shard", 4, NEVER | ONE, "2 P (d-1)/d, never resharded", fsdp(1)),
    Case("dp_shard", 4, ALWAYS | ONE, "3 P (d-1)/d", fsdp(2)),
    Case("dp_shard", 4, ALWAYS | MANY, "(2 m + 1) P (d-1)/d, m = 4", fsdp(2 * MICROBATCHES)),
    Case("dp_replicate", 2, parallel(dp_replicate=2), "2 P/d (r-1)/r", replicas(2), also=2),
    Case("tp", 4, parallel(tp=4), "(t-1)/t b h (8 s + 12)", tensor),
    Case(
        "tp",
        4,
        parallel(tp=4, sequence_parallel=False),
        "(t-1)/t b h (8 s + 6), whole tokens",
        replicated_tokens,
    ),
    Case("cp", 4, parallel(cp=4), "6 (c-1)/c b s h, ring", ring),
    Case("cp", 4, parallel(cp=4, cp_method="ulysses"), "8 (c-1)/c^2 b s h, ulysses", ulysses),
    Case("pp", 2, parallel(pp=2) | MANY, "2 b (s+1) h, all ranks", messages, is_whole=True),
)

OPERATIONS = {
    "dp_shard": ("all-gather", "reduce-scatter"),
    "dp_replicate": ("all-reduce",),
    "tp": ("all-gather", "reduce-scatter", "all-reduce"),
    "cp": ("ring", "all-to-all"),
    "pp": ("send",),
}
"""Collectives of a layer by axis, without those of FSDP over cp."""


def sent(case: Case, layers: int) -> tuple[int, int]:
    """(calls, bytes) of a step on the case's axis."""
    model = {
        "name": "dit",
        "hidden_size": HIDDEN,
        "num_layers": layers,
        "num_heads": HEADS,
        "patch_size": PATCH,
        "latent_size": LATENT,
        "in_channels": 1,
        "num_classes": 10,
    }
    data_ranks = case.ranks * case.also if case.axis.startswith("dp_") else 1
    tables: dict[str, dict[str, Any]] = {
        "model": model,
        "objective": {"name": "rectified_flow"},
        "data": {"name": "digits"},
        "training": {"steps": 1, "global_batch_size": BATCH * data_ranks},
        "precision": {"dtype": "bf16"},
    }
    for name, table in case.sections.items():
        tables[name] = tables.get(name, {}) | table
    config = config_file.build(tables, catalog.variant)
    plan = resolve(config, case.ranks * case.also)
    facts, fields = config.objective.example(config.model)
    objective = config.objective.build(config.model, facts)
    settings = config.training, config.optimizer, config.ema
    calls: Counter[str] = Counter()
    for rank in take_fake_step(plan, objective, fields, *settings).ranks:
        for operation in OPERATIONS[case.axis]:
            calls["calls"] += rank.traffic.calls[case.axis, operation]
            calls["bytes"] += rank.traffic.bytes[case.axis, operation]
    return calls["calls"], calls["bytes"]


def compared(case: Case) -> dict[str, str]:
    """One row of the table."""
    calls, counted = sent(case, LAYERS)
    if not case.is_whole:
        more_calls, more = sent(case, LAYERS + 1)
        calls, counted = more_calls - calls, more - counted
    theory = case.theory(case.ranks)
    return {
        "axis": case.axis,
        "ranks": str(case.ranks),
        "elements": case.formula,
        "calls": str(calls),
        "bytes": f"{counted:,}",
        "theory": f"{theory:,.0f}",
        "ratio": f"{counted / theory:.3f}",
    }


def main() -> None:
    """Count and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--axes", nargs="+", choices=list(OPERATIONS), help="default all")
    parser.add_argument("--out", help="JSON")
    options = parser.parse_args()
    axes = options.axes or list(OPERATIONS)
    rows = [compared(case) for case in CASES if case.axis in axes]
    finish(f"collectives b {S.b} s {S.s} h {S.h}", rows, options.out)


if __name__ == "__main__":
    main()
