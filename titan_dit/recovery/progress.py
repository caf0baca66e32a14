"""A run's progress as plain values, stored in a checkpoint's record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from titan_dit.recovery.ledger import Ledger
from titan_dit.recovery.rollback import Rollbacks


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
