"""Whether a dataset has what an objective reads."""

from __future__ import annotations

from collections.abc import Mapping

from titan_dit import doors
from titan_dit.data.base import Field
from titan_dit.objectives.base import Objective
from titan_dit.section import UserError, show

MEMBERS = {
    "takes": "the fields of a sample that it reads",
    "prepare": "fields to inputs and targets",
    "loss": "predictions and targets to a loss per token",
}
"""What every objective must have."""


def check_members(objective: Objective) -> None:
    """Refuse an objective that lacks what every one must have."""
    doors.require(type(objective), MEMBERS, "[objective] name", type(objective).__name__)


def check_fields(fields: Mapping[str, Field], objective: Objective, data: str) -> None:
    """Every field that the objective takes must be there; `data` is the name of [data]."""
    missing = [name for name in objective.takes if name not in fields]
    if missing:
        raise UserError(
            f"[data] name={show(data)} has the fields {', '.join(fields)}, but [objective] "
            f"takes {', '.join(objective.takes)}: {', '.join(missing)} is missing. Choose data or "
            "an objective that fit each other."
        )
