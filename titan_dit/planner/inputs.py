"""Batches of fake samples as the parts of a model take them, prepared once for all rehearsals.

What an objective prepares depends on the number of samples and on cp, which slices them; not on tp,
[remat] or [precision].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from titan_dit.config.training import EMAConfig, TrainingConfig
from titan_dit.data.base import Batch, Field
from titan_dit.dry_run import fake_step
from titan_dit.dry_run.memory import MemoryLog, StorageKind
from titan_dit.execution.sliced import SlicedExecutor
from titan_dit.objectives.base import Objective, Prepared
from titan_dit.optim.optimizer import OptimizerConfig
from titan_dit.plan import RunPlan
from titan_dit.planner.chain import Marks, Pass
from titan_dit.planner.oplog import tensors
from titan_dit.rng import SampleRNG

Key: TypeAlias = tuple[int, int, str]
"""(samples, cp, cp method)"""


@dataclass(frozen=True, kw_only=True)
class Sections:
    """The parts of a config that do not depend on the layout."""

    objective: Callable[[], Objective]
    """Makes one: its modules are placed and cast by a rehearsal."""
    fields: Mapping[str, Field]
    training: TrainingConfig
    optimizer: OptimizerConfig
    ema: EMAConfig


@dataclass
class Prepare:
    """How a batch was prepared."""

    made: Pass
    read: frozenset[int] = frozenset()
    """Storages of the preparation that the parts read."""
    cached: float = 0.0
    """Bytes that the objective prepares once for all steps."""


class Inputs:
    """The fake tensors of a config's batches; all rehearsals share them and their mode."""

    def __init__(self, sections: Sections) -> None:
        self.sections, self.objective = sections, sections.objective()
        self.mode = fake_tensors()
        self.batches: dict[Key, tuple[Prepared, Prepare]] = {}
        self.cached: float | None = None
        """Bytes; None before the first batch."""

    def of(
        self, plan: RunPlan, size: int, executor: Any, memory: MemoryLog, marks: Marks
    ) -> tuple[Prepared, Prepare]:
        """This rank's slice of a batch of `size` samples; within `mode` and the logs.

        A new batch is recorded as the pass ("inputs", "prepare") of `marks`.
        """
        cp = plan.sizes.cp
        key = size, cp, plan.parallel.cp_method if cp > 1 else ""
        if key not in self.batches:
            self.batches[key] = self.made(plan, size, executor, memory, marks)
        prepared, how = self.batches[key]
        # These logs have not seen what was made before.
        memory.mark(tensors_of(prepared), StorageKind.INPUTS)
        return prepared, how

    def made(
        self, plan: RunPlan, size: int, executor: Any, memory: MemoryLog, marks: Marks
    ) -> tuple[Prepared, Prepare]:
        """A new batch; the second time, as the objective keeps some tensors of the first."""
        start = len(memory.events)
        first = self.prepare(plan, size, executor)
        whole = sum(change for _, change in memory.events[start:])
        del first
        with marks.of("inputs", "prepare"):
            prepared = self.prepare(plan, size, executor)
        how = Prepare(marks.passed("inputs", "prepare"))
        if self.cached is None:
            self.cached = whole - sum(change.bytes for change in how.made.changes)
        how.cached = self.cached
        return prepared, how

    def prepare(self, plan: RunPlan, size: int, executor: Any) -> Prepared:
        """This rank's slice of a batch whose fields are zero."""
        empty = {
            name: torch.zeros(size, *(n or 1 for n in field.shape), dtype=field.dtype)
            for name, field in self.sections.fields.items()
        }
        numbers = torch.arange(size)
        batch = Batch(empty, numbers, weight=torch.ones(size), total_weight=float(size))
        prepared = self.objective.prepare(batch, SampleRNG(plan.seed, numbers))
        if isinstance(executor, SlicedExecutor):
            prepared = executor.sliced(prepared)
        if prepared.total_tokens is None:
            prepared = replace(prepared, total_tokens=prepared.weight.sum(dtype=torch.float64))
        return prepared


def tensors_of(prepared: Prepared) -> Iterator[Tensor]:
    """All tensors of a batch."""
    return tensors(*vars(prepared).values())


def fake_tensors() -> Any:
    """The mode in which tensors have no memory; torch's class of it is private to the dry run."""
    return fake_step.FakeTensorMode(allow_non_fake_inputs=True)  # type: ignore[attr-defined]
