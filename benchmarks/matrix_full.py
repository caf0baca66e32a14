"""Memory and time of a row without a device: a dry run of the whole step, and the planner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from matrix_rows import Row, full_config

from titan_dit.config.job import JobConfig
from titan_dit.dry_run.fake_step import RankReport, Report, take_fake_step
from titan_dit.dry_run.memory import StorageKind
from titan_dit.plan import resolve
from titan_dit.planner.counts import Rehearsals
from titan_dit.planner.memory import memory

GIB, TERA = 2**30, 1e12


def rehearsed(config: JobConfig, num_ranks: int) -> Report:
    """The dry run of a step; the data need not exist."""
    facts, fields = config.objective.example(config.model)
    objective = config.objective.build(config.model, facts)
    own = config.training, config.optimizer, config.ema
    return take_fake_step(resolve(config, num_ranks), objective, fields, *own)


def rehearsal_row(row: Row) -> dict[str, Any]:
    """Memory of the rank that needs most, what a rank sends at most, FLOPs and idle time."""
    report = rehearsed(full_config(row), row.ranks)
    largest = max(report.ranks, key=lambda rank: rank.peak.total)
    found: dict[str, Any] = {"case": row.case, "layout": row.layout, "rank": largest.rank}
    found |= {str(kind): gib(largest.peak.bytes[kind]) for kind in StorageKind}
    found["peak GiB"] = gib(largest.peak.total)
    for axis in ("dp_shard", "tp", "pp"):
        found[f"{axis} GiB"] = gib(max(sent(rank)[axis] for rank in report.ranks))
    found["TFLOP"] = f"{max(rank.flops for rank in report.ranks) / TERA:.1f}"
    found["idle"] = f"{mean(rank.idle for rank in report.ranks):.1%}"
    return found


def sent(rank: RankReport) -> Counter[str]:
    """Bytes that a rank sends in a step, by axis."""
    found: Counter[str] = Counter()
    for (axis, _), size in rank.traffic.bytes.items():
        found[axis] += size
    return found


def gib(size: float) -> str:
    """Bytes as GiB."""
    return f"{size / GIB:.2f}"


def mean(values: Iterable[float]) -> float:
    """The arithmetic mean."""
    several = list(values)
    return sum(several) / len(several)


@dataclass(frozen=True)
class Storages:
    """Bytes at the peak of a pipeline rank."""

    dry_run: float
    formula: float
    """The planner's."""


def planned(config: JobConfig, num_ranks: int) -> list[Storages]:
    """Planned memory of the pipeline ranks."""
    plan = resolve(config, num_ranks)
    formulas = memory(plan, Rehearsals(config).counts(plan))
    ranks = rehearsed(config, num_ranks).ranks
    return [
        Storages(rank.peak.total, sum(held.values()))
        for rank, held in zip(ranks, formulas, strict=True)
    ]
