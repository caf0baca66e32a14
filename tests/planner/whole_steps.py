"""Dry runs of whole steps beside the memory of the planner's formulas, in another process.

The tests' shape checks reject sharded tokens, so both run in a process without them.
"""

import contextlib
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from unittest import mock

import forked

from titan_dit.config import catalog, config_file
from titan_dit.dry_run import fake_step
from titan_dit.dry_run.memory import MemoryLog, Storage, StorageKind
from titan_dit.execution.planned import Planned
from titan_dit.plan import resolve
from titan_dit.planner.counts import Rehearsals
from titan_dit.planner.memory import memory
from titan_dit.planner.optimizer_state import state_of


@dataclass(frozen=True)
class Compared:
    """Bytes by kind of every pipeline rank, at the dry run's peak and by formula."""

    measured: list
    composed: list

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


@contextlib.contextmanager
def all_microbatches():
    """Let a dry run of a pipeline hold what a device would.

    It runs as few microbatches as reach the peak of activations: gradients of earlier ones, which
    are in memory at that peak from one more on, are missing then. It counts tensors on the meta
    device, which only have shapes. Its sends never complete, and keep their tensors.
    """
    fewest, record, send = fake_step.microbatches_to_run, MemoryLog._record, Planned.send

    def every(plan, count):
        fewer, enough = fewest(plan, count)
        return fewer, enough if plan.sizes.pp == 1 else count

    def with_memory(log, tensor):
        if tensor.device.type == "meta":
            return Storage(StorageKind.TEMPORARY, 0)
        return record(log, tensor)

    def sent_at_once(source, message, tensors):
        send(source, message, tensors)
        source.sends.clear()

    with (
        mock.patch.object(Planned, "send", sent_at_once),
        mock.patch.object(fake_step, "microbatches_to_run", every),
        mock.patch.object(MemoryLog, "_record", with_memory),
    ):
        yield


def compare(tables, world):
    """Dry-run a config's tables on `world` ranks, and compose the same."""
    config = config_file.build(tables, catalog.variant)
    facts, fields = config.objective.example(config.model)
    objective = config.objective.build(config.model, facts)
    plan = resolve(config, world)
    with all_microbatches():
        sections = config.training, config.optimizer, config.ema
        report = fake_step.take_fake_step(plan, objective, fields, *sections)
    composed = memory(plan, Rehearsals(config).counts(plan), state=state_of(config))
    return Compared([dict(rank.peak.bytes) for rank in report.ranks], composed)


@contextlib.contextmanager
def comparing():
    """`compare` in another process."""
    with ProcessPoolExecutor(1, forked.context()) as pool:
        yield lambda *given: pool.submit(compare, *given).result()
