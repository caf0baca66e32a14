"""Decides and records a rollback after too many consecutive bad steps; restore.py carries it out.

The bad steps' samples are skipped from then on. `RUN/rollbacks.json` records this at once, because
the run may end before its next checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from titan_dit.checkpoint.run_checkpoints import Checkpoints
from titan_dit.config import schema, user_text
from titan_dit.config.operation import FaultsConfig
from titan_dit.config.section import UserError
from titan_dit.data.order import SampleRange
from titan_dit.recovery.ledger import Skipped
from titan_dit.recovery.resume import Start, set_aside_newer
from titan_dit.system import run_files
from titan_dit.system.files import write_json

FILE = run_files.ROLLBACKS
SCHEMA = {
    "skipped": schema.Rows((schema.COUNT, schema.COUNT, str)),
    "in_vain": schema.COUNT,
    "reached": schema.COUNT,
}


@dataclass(frozen=True)
class BadSteps:
    """The consecutive bad steps that cause a rollback."""

    first: int
    last: int
    numbers: SampleRange
    """(first, end) of the sample numbers that they drew."""

    def message(self, path: object) -> str:
        """A line for a run that went back to the checkpoint at `path`."""
        first, end = self.numbers
        return (
            f"rolled back from step {self.last} to {path}: samples {first} to {end - 1} are skipped"
        )

    def as_skipped(self) -> Skipped:
        """The ledger entry of their samples."""
        reason = f"steps {self.first} to {self.last} were bad"
        return Skipped(*self.numbers, reason)


@dataclass(frozen=True)
class Rollbacks:
    """A run's rollbacks, stored in its directory."""

    skipped: tuple[Skipped, ...] = ()
    in_vain: int = 0
    """Consecutive rollbacks without progress past `reached`."""
    reached: int = 0
    """The last bad step of any rollback."""

    def with_rollback(self, bad: BadSteps) -> Rollbacks:
        """Return the rollbacks with one more."""
        in_vain = self.in_vain + 1 if bad.first <= self.reached else 1
        return Rollbacks((*self.skipped, bad.as_skipped()), in_vain, max(self.reached, bad.last))

    def write(self, folder: Path) -> None:
        """Write `rollbacks.json` atomically and durably."""
        values = {**vars(self), "skipped": [list(vars(entry).values()) for entry in self.skipped]}
        write_json(folder / FILE, values)


def read(folder: Path) -> Rollbacks:
    """Read a run's rollbacks; none if there is no file."""
    if not (folder / FILE).is_file():
        return Rollbacks()
    try:
        values = user_text.read_json(folder / FILE, "it")
        schema.check(values, SCHEMA, "")
    except ValueError as error:
        raise UserError(
            f"[faults] {folder / FILE} is damaged: {str(error).strip(' .')}. Restore the file, or "
            "start a new run with --job.name."
        ) from None
    return Rollbacks(
        tuple(Skipped(*entry) for entry in values["skipped"]), values["in_vain"], values["reached"]
    )


def record_rollback(
    folder: Path, checkpoints: Checkpoints, config: FaultsConfig, bad: BadSteps, start: Start
) -> Rollbacks:
    """Roll back to `start`: rename newer checkpoints and record the rollback. Rank 0 only.

    Raises UserError and changes nothing if rollback is disabled, no checkpoint precedes the bad
    steps, or the last `max_rollbacks` rollbacks brought no progress.
    """
    rollbacks, limit = read(folder).with_rollback(bad), config.max_rollbacks
    lower = "lower [optimizer] lr with --checkpoint.allow_changes true"
    older = "resume from an older checkpoint with --checkpoint.resume PATH"
    if limit == 0:
        fix = f"Allow rollbacks: --faults.max_rollbacks 3; or {lower}."
        raise UserError(refusal(folder, config, bad, "max_rollbacks=0", fix))
    if start.path is None:
        reason = f"no checkpoint from before step {bad.first}"
        raise UserError(refusal(folder, config, bad, reason, "Lower [optimizer] lr in a new run."))
    if rollbacks.in_vain > limit:
        reason = f"max_rollbacks={limit} brought no progress"
        fix = f"{lower.capitalize()}, or {older}."
        raise UserError(refusal(folder, config, bad, reason, fix))
    # Rename first: after a kill in between, the run repeats the bad steps and rolls back again.
    set_aside_newer(checkpoints, start)
    rollbacks.write(folder)
    return rollbacks


def refusal(folder: Path, config: FaultsConfig, bad: BadSteps, reason: str, fix: str) -> str:
    """The error message of a run that cannot roll back: why (`reason`) and what to do (`fix`)."""
    return (
        f"[faults] max_consecutive_bad_steps={config.max_consecutive_bad_steps}: the last "
        f"{bad.last - bad.first + 1} steps up to step {bad.last} had a non-finite loss or gradient "
        f"or a spike, and the run cannot roll back: {reason}. {fix} The samples: "
        f"python -m titan_dit replay --run {folder} --step {bad.first}. See docs/bad-numbers.md."
    )
