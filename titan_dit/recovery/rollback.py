"""Going back to the last good checkpoint when nothing but bad steps comes.

The data that the bad steps drew is left out from then on. `RUN/rollbacks.json` says so at once, as
the run may end before its next checkpoint.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from titan_dit.checkpoint.run_checkpoints import Checkpoints
from titan_dit.config.operation import FaultsConfig
from titan_dit.config.section import UserError
from titan_dit.data.sample_ranges import SampleRange
from titan_dit.recovery.ledger import Skipped
from titan_dit.recovery.resume import Start, set_aside_newer
from titan_dit.system.files import write_whole

FILE = "rollbacks.json"


@dataclass(frozen=True)
class BadSteps:
    """The steps that a run goes back for."""

    first: int
    last: int
    numbers: SampleRange
    """The samples that they drew, from the first to behind the last one."""

    def told(self, path: object) -> str:
        """A line for a run that went back to the checkpoint at `path`."""
        first, end = self.numbers
        return (
            f"rolled back from step {self.last} to {path}: samples {first} to {end - 1} are skipped"
        )

    def as_skipped(self) -> Skipped:
        """What no step is to draw any more."""
        reason = f"steps {self.first} to {self.last} were bad"
        return Skipped(*self.numbers, reason)


@dataclass(frozen=True)
class Rollbacks:
    """How often the run went back, kept in its folder: the next checkpoint may never come."""

    skipped: tuple[Skipped, ...] = ()
    in_vain: int = 0
    """Times in a row that it did not come further than the time before."""
    reached: int = 0
    """The bad step at which it last went back."""

    def again(self, bad: BadSteps) -> Rollbacks:
        """Once more."""
        in_vain = self.in_vain + 1 if bad.first <= self.reached else 1
        return Rollbacks((*self.skipped, bad.as_skipped()), in_vain, max(self.reached, bad.last))

    def write(self, folder: Path) -> None:
        """Into a run's folder, on the disk when this returns, whole or not at all."""
        values = {**vars(self), "skipped": [list(vars(entry).values()) for entry in self.skipped]}
        write_whole(folder / FILE, (json.dumps(values, indent=2) + "\n").encode())


def read(folder: Path) -> Rollbacks:
    """Those of a run so far."""
    if not (folder / FILE).is_file():
        return Rollbacks()
    values = json.loads((folder / FILE).read_text())
    return Rollbacks(
        tuple(Skipped(*entry) for entry in values["skipped"]),
        values["in_vain"],
        values["reached"],
    )


def go_back(
    folder: Path, checkpoints: Checkpoints, config: FaultsConfig, bad: BadSteps, start: Start
) -> Rollbacks:
    """The rollbacks with this one to `start`; for the first rank to call.

    Checkpoints of the bad steps are set aside. Raises UserError, and changes nothing, where there
    is no checkpoint from before them, or the run has come no further with `max_rollbacks`.
    """
    rollbacks = read(folder).again(bad)
    if config.max_rollbacks == 0:
        raise UserError(why_not(folder, config, bad, "max_rollbacks=0"))
    if start.path is None:
        raise UserError(why_not(folder, config, bad, f"no checkpoint from before step {bad.first}"))
    if rollbacks.in_vain > config.max_rollbacks:
        reason = f"max_rollbacks={config.max_rollbacks} did not get it any further"
        raise UserError(why_not(folder, config, bad, reason))
    # Aside first: a kill in between leaves a run that meets the bad steps, and goes back, anew.
    set_aside_newer(checkpoints, start)
    rollbacks.write(folder)
    return rollbacks


def why_not(folder: Path, config: FaultsConfig, bad: BadSteps, reason: str) -> str:
    """The message of a run that ends here."""
    return (
        f"[faults] max_consecutive_bad_steps={config.max_consecutive_bad_steps}: the last "
        f"{bad.last - bad.first + 1} steps had a non-finite loss or gradient, or a spike (step "
        f"{bad.last}), and the run cannot go back: {reason}. Lower [optimizer] lr, look at the "
        f"data (python -m titan_dit replay --run {folder} --step {bad.first}), or resume from an "
        "older checkpoint with --checkpoint.resume PATH."
    )
