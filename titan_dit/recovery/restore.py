"""Loads a run's tensors and progress from a checkpoint, to resume or to roll back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from titan_dit.checkpoint import checkpoint
from titan_dit.checkpoint.averages import Snapshots
from titan_dit.checkpoint.run_checkpoints import Checkpoints
from titan_dit.checkpoint.staging import TensorTree
from titan_dit.config.job import RunConfig
from titan_dit.config.operation import CheckpointConfig, FaultsConfig
from titan_dit.config.training import EMAConfig
from titan_dit.launcher.ranks import Ranks
from titan_dit.optim.ema import EMA
from titan_dit.recovery import resume, rollback, run_identity
from titan_dit.recovery.ledger import Ledger
from titan_dit.recovery.rollback import BadSteps, Rollbacks


@dataclass(frozen=True)
class Progress:
    """Progress after a step, equal on all ranks; the default is step 0."""

    step: int = 0
    cursor: int = 0
    """First sample number of the next step."""
    ledger: Ledger = field(default_factory=Ledger)
    """Status of the samples before the cursor."""
    guard: Mapping[str, Any] = field(default_factory=dict)
    """The values of `Guard.state`."""

    @classmethod
    def of(cls, record: Mapping[str, Any], rollbacks: Rollbacks | None = None) -> Progress:
        """Read from a checkpoint's record; an empty record is step 0.

        Adds the skipped ranges of later `rollbacks`. Old records have only `nan_steps`, no guard.
        """
        ledger = Ledger.of(record)
        return cls(
            record.get("step", 0),
            record.get("cursor", 0),
            ledger.skip(rollbacks.skipped) if rollbacks else ledger,
            {"nan_steps": record.get("nan_steps", 0), **record.get("guard", {})},
        )

    def as_record(self, num_rows: int) -> dict[str, Any]:
        """The keys that `of` reads; `num_rows`, the rows per epoch, give the epoch."""
        return {
            "step": self.step,
            "cursor": self.cursor,
            "nan_steps": self.guard["nan_steps"],
            "guard": dict(self.guard),
            "ledger": self.ledger.as_json(self.cursor, num_rows),
        }


Say: TypeAlias = Callable[..., None]
"""Prints console lines."""


def saves_of(run: RunConfig, settings: CheckpointConfig, ema: EMAConfig, steps: int) -> Checkpoints:
    """The checkpoints of a run that trains, with the snapshots of its averages."""
    checkpoints = resume.checkpoints_of(run, settings)
    checkpoints.snapshots = Snapshots(checkpoints, ema, steps)
    return checkpoints


def resumed(
    checkpoints: Checkpoints,
    run: RunConfig,
    settings: CheckpointConfig,
    identity: run_identity.Identity,
    tensors: TensorTree,
    ema: EMA,
    say: Say,
) -> Progress | None:
    """Load the checkpoint selected by [checkpoint] resume; None to start at step 0. Collective.

    A run that starts at step 0 takes its weights from [checkpoint] init.

    Raises UserError if the checkpoint does not match `identity`, unless allow_changes is set. A
    change that would train on held-out rows is always refused.
    """
    start, ranks = resume.starting_point(checkpoints, settings.resume), Ranks()
    path, record = start.path, start.record
    if path is None:
        ranks.run_on_first(lambda: resume.check_not_elsewhere(run, settings))
        checkpoints.forget_snapshots_after(0)
        if settings.init:
            from titan_dit.recovery import initial_weights

            say(*initial_weights.load(settings, identity, tensors["model"], ema))
        return None
    say(*start.messages())
    run_identity.check_held_out(path, record, identity)
    own = resume.is_own(checkpoints, path)
    if not settings.allow_changes:
        advice = partial(run_identity.ways_out, path, tensors["model"], own=own)
        run_identity.check_same_mathematics(path, record, identity, advice)
    resume.check_adapters(path, record, tensors["model"])
    has_moments = record.get("imported") and checkpoint.holds(path, "optimizer")
    if settings.allow_changes or has_moments:
        # The checkpoint may be of another optimizer, or of a run with frozen parameters.
        tensors, lines = resume.without_missing(path, tensors)
        say(*lines)
    load_weights = resume.load_imported if record.get("imported") else resume.load
    load_weights(path, record, tensors, ema)
    rollbacks = rollback.read(run.folder) if own else Rollbacks()
    progress = Progress.of(record, ranks.gather(rollbacks)[0])
    if ranks.is_first:
        resume.set_aside_newer(checkpoints, start)
    checkpoints.forget_snapshots_after(progress.step)
    say(f"resumed from {path}", *run_identity.lines_of_new_keys(record, identity))
    return progress


def rolled_back(
    checkpoints: Checkpoints,
    run: RunConfig,
    config: FaultsConfig,
    bad: BadSteps,
    tensors: TensorTree,
    ema: EMA,
    say: Say,
) -> Progress:
    """Load the newest checkpoint before the bad steps, or raise UserError. Collective."""
    checkpoints.wait()
    start = resume.newest_before(checkpoints, bad.first)
    # Only the first rank changes the disk; if it cannot, all ranks raise.
    rollbacks = Ranks().run_on_first(
        lambda: rollback.record_rollback(run.folder, checkpoints, config, bad, start)
    )
    assert start.path
    checkpoints.forget_snapshots_after(start.record["step"])
    # The checkpoint may be of another optimizer: the run was then resumed with allow_changes.
    tensors, lines = resume.without_missing(start.path, tensors)
    resume.load(start.path, start.record, tensors, ema)
    say(*start.messages(), bad.message(start.path), *lines)
    return Progress.of(start.record, rollbacks)
