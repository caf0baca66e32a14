"""Dry runs of whole steps beside the memory of the planner's formulas, in another process.

The tests' shape checks reject sharded tokens, so both run in a process without them.
"""

import contextlib
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import forked

from titan_dit.config import catalog, config_file
from titan_dit.dry_run.fake_step import take_fake_step
from titan_dit.dry_run.memory import StorageKind
from titan_dit.plan import resolve
from titan_dit.planner.counts import Rehearsals
from titan_dit.planner.memory import memory, state_of


@dataclass(frozen=True)
class Compared:
    """Bytes by kind of every pipeline rank, at the dry run's peak and by formula."""

    measured: list
    composed: list
    on_host: list
    """Of each rank, bytes in host memory (composed, at the dry run's peak)."""

    @property
    def errors(self):
        """Of each rank, relative."""
        pairs = zip(self.composed, self.measured, strict=True)
        return [sum(mine.values()) / sum(true.values()) - 1 for mine, true in pairs]

    @property
    def error(self):
        """Of the rank that holds most."""
        mine, true = (
            max(sum(r.values()) for r in ranks) for ranks in (self.composed, self.measured)
        )
        return mine / true - 1


def compare(tables, world):
    """Dry-run a config's tables on `world` ranks, and compose the same."""
    config = config_file.build(tables, catalog.variant)
    facts, fields = config.objective.example(config.model)
    objective = config.objective.build(config.model, facts)
    plan = resolve(config, world)
    sections = config.training, config.optimizer, config.ema
    report = take_fake_step(plan, objective, fields, *sections)
    composed = memory(plan, Rehearsals(config).counts(plan), state=state_of(config))
    peaks = [dict(rank.peak.bytes) for rank in report.ranks]
    both = zip(composed, peaks, strict=True)
    on_host = [tuple(held.pop(StorageKind.HOST, 0.0) for held in pair) for pair in both]
    return Compared(peaks, composed, on_host)


@contextlib.contextmanager
def comparing():
    """`compare` in another process."""
    with ProcessPoolExecutor(1, forked.context()) as pool:
        yield lambda *given: pool.submit(compare, *given).result()
