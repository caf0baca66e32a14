"""Snapshots of a run's power-function averages, from which `ema` makes other averages.

They are checkpoints without weights and moments, `averages/step-00000100` in the checkpoint folder.
[checkpoint] keep does not delete them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from titan_dit.checkpoint.run_checkpoints import Checkpoints, step_of
from titan_dit.checkpoint.staging import TensorTree
from titan_dit.checkpoint.store import Location, store_of
from titan_dit.config.section import UserError
from titan_dit.config.training import EMAConfig, power_name
from titan_dit.launcher.ranks import Ranks

FOLDER = "averages"
GIB = 2**30


def averages_in(record: Mapping[str, Any]) -> list[str]:
    """Keys of the averages in a checkpoint, by its record."""
    table = record["config"]["ema"]
    return [*map(str, table["decays"]), *map(power_name, table.get("power", ()))]


class Snapshots(Checkpoints):
    """The snapshots beside a run's checkpoints."""

    kind, rarer = "snapshot", "a smaller [ema] snapshots"

    def __init__(self, beside: Checkpoints, ema: EMAConfig, steps: int) -> None:
        # All are kept, and failed saves do not stop the run.
        settings = replace(beside.settings, keep=0, keep_every=0, max_failures=0)
        super().__init__(beside.folder / FOLDER, settings)
        self.ema, self.steps = ema, steps
        self.names = [power_name(sigma_rel) for sigma_rel in ema.power]
        self.messages = beside.messages
        self.newest_step = -1

    def is_due(self, step: int) -> bool:
        """True if a snapshot is taken after `step`; never with [checkpoint] every=0."""
        return bool(self.settings.every) and self.ema.takes_snapshot(step, self.steps)

    def save_due(self, step: int, averages: TensorTree, record: Mapping[str, Any]) -> None:
        """Start saving the snapshot of `step` if it is due and was not saved yet. Collective."""
        if self.is_due(step) and step != self.newest_step:
            self.newest_step = step
            self.save(step, {"ema": {name: averages[name] for name in self.names}}, record)

    def record_success(self, path: Location) -> None:
        """Say nothing: there are many."""

    def record_failure(self, step: int, cause: str) -> None:
        """Report a failed save; unlike a checkpoint's, it is not retried."""
        self.failures.append(cause)
        self.messages.append(
            f"[ema] the snapshot of step {step} was not saved in {self.folder}: {cause}. Training "
            "continues; `ema` makes averages of the others, with a larger error"
        )

    def forget_after(self, step: int) -> None:
        """Delete the snapshots after `step`, from which the run goes on. Collective.

        Raises UserError on every rank if one cannot be deleted: it would count as a snapshot of the
        repeated steps.
        """
        self.wait()
        self.newest_step = -1
        Ranks().run_on_first(lambda: self.delete_after(step))

    def delete_after(self, step: int) -> None:
        """`forget_after` on rank 0."""
        store = store_of(self.folder)
        for path in self.folders():
            if step_of(path) > step:
                store.remove(path)
                if store.names(path):
                    raise UserError(
                        f"[ema] snapshots: the run goes on after step {step}, but {path} cannot be "
                        "deleted. Delete it, then run the same command again."
                    )

    def lines(self, num_parameters: int) -> Iterator[str]:
        """The console line with the number of snapshots and the disk space, 4 bytes an element."""
        taken = self.ema.num_snapshots(self.steps)
        if taken and not self.settings.every:
            yield "no snapshots of [ema] power are taken: [checkpoint] every=0"
        elif taken:
            each = 4 * num_parameters * len(self.names)
            yield (
                f"averages: {taken} snapshots of {len(self.names)}, {each / GIB:,.3g} GiB each, "
                f"{taken * each / GIB:,.3g} GiB in all, in {self.folder}"
            )
