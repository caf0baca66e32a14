"""How far a run has come, in plain values: what a checkpoint's record says beside its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from titan_dit.recovery.ledger import Ledger
from titan_dit.recovery.rollback import Rollbacks


@dataclass(frozen=True)
class Progress:
    """Where a run stands after a step, alike on all ranks. The default is before the first one."""

    step: int = 0
    cursor: int = 0
    """Samples from the start of training: the next step draws from here on."""
    ledger: Ledger = field(default_factory=Ledger)
    """What became of the samples before the cursor."""
    guard: Mapping[str, Any] = field(default_factory=dict)
    """What the guard has counted (`Guard.state`)."""

    @classmethod
    def of(cls, record: Mapping[str, Any], rollbacks: Rollbacks | None = None) -> Progress:
        """That of a checkpoint's record; of an empty one, the start.

        What the run has left out since, by its `rollbacks`, is left out here too. A record from
        before there was a guard has `nan_steps` alone.
        """
        ledger = Ledger.of(record)
        return cls(
            record.get("step", 0),
            record.get("cursor", 0),
            ledger.skip(rollbacks.skipped) if rollbacks else ledger,
            {"nan_steps": record.get("nan_steps", 0), **record.get("guard", {})},
        )

    def as_record(self, num_rows: int) -> dict[str, Any]:
        """The keys of a checkpoint's record that `of` reads, for a dataset of so many rows."""
        return {
            "step": self.step,
            "cursor": self.cursor,
            "nan_steps": self.guard["nan_steps"],
            "guard": dict(self.guard),
            "ledger": self.ledger.as_json(self.cursor, num_rows),
        }
