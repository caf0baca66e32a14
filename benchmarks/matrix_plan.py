"""The rows at full size, planned for a device: time and memory by this project's own runtime."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matrix_rows import Row, full_config

from titan_dit.plan import RunPlan, resolve
from titan_dit.planner import memory, step
from titan_dit.planner.counts import Rehearsals
from titan_dit.planner.hardware import Device, device_of
from titan_dit.planner.report import ACROSS
from titan_dit.planner.search import tp_crosses_nodes
from titan_dit.planner.work import Counts
from titan_dit.system.progress import ProgressLine


def plan_rows(rows: Sequence[Row], name: str) -> list[dict[str, Any]]:
    """Milliseconds and memory of each row on a device, by this project's own runtime."""
    device = device_of(name)
    rehearsals: dict[str, Rehearsals] = {}
    progress = ProgressLine(len(rows), "rows", what=f"planned on {device.name}")
    found = []
    for row in rows:
        config = full_config(row)
        plan = resolve(config, row.ranks)
        counts = rehearsals.setdefault(row.recipe, Rehearsals(config)).counts(plan)
        found.append(plan_row(row, plan, counts, device))
        progress.add(1)
    progress.end()
    return found


def plan_row(row: Row, plan: RunPlan, counts: Counts, device: Device) -> dict[str, Any]:
    """One row, beside what others measured: other software on V100s."""
    estimate = step.estimate(plan, counts, device)
    needs = [memory.device_memory(held, plan, device) for held in memory.memory(plan, counts)]
    largest = max(needs, key=lambda needed: needed.total)
    shares = sorted(estimate.terms.items(), key=lambda term: -term[1])
    terms = ", ".join(f"{term} {share / estimate.seconds:.0%}" for term, share in shares[:3])
    across = f" ({ACROSS})" if tp_crosses_nodes(plan.sizes, device) else ""
    return {
        "case": row.case,
        "layout": row.layout,
        # Such predictions are the least certain.
        "planned ms": f"{1e3 * estimate.seconds:.0f}" + across,
        "mostly": terms,
        "allocated GiB": f"{largest.allocated:.2f}",
        "in total GiB": f"{largest.total:.2f}",
        "fits": "yes" if memory.fits(largest, device) else "no",
        "Megatron-LM ms": row.megatron_ms,
        "Megatron-LM MiB": row.megatron_mib,
        "OneFlow ms": row.oneflow_ms,
        "OneFlow MiB": row.oneflow_mib,
    }
