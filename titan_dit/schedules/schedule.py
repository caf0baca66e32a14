"""A pipeline schedule: a program for every rank, and its requirements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from titan_dit.config import catalog
from titan_dit.config.dotted_names import look_up
from titan_dit.config.section import UserError, show
from titan_dit.schedules.action import Program

KEY = "[pipeline] schedule"


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A row of `catalog.SCHEDULES`, or a user's own."""

    program: Callable[[int, int, int, int], Program]
    """(rank, ranks p, microbatches m, stages per rank v) -> the rank's actions, in order."""
    v_shaped: bool = False
    """Rank r holds stages r and 2p - 1 - r. Otherwise r, r + p, r + 2p, ..."""
    interleaved: bool = False
    """A rank holds [pipeline] virtual_stages stages. Otherwise two if V-shaped, else one."""
    splits_backward: bool = False
    """Input and weight gradients are computed separately."""
    check: Callable[[str, int, int, int], None] = lambda name, p, m, v: None
    """(name, p, m, v): raise UserError if the schedule does not support m microbatches."""

    def __post_init__(self) -> None:
        """Refuse a schedule that is both V-shaped and interleaved."""
        if self.v_shaped and self.interleaved:
            raise UserError(f"{KEY}: a Schedule is v_shaped or interleaved, not both.")


def schedule_of(name: str) -> Schedule:
    """The schedule that [pipeline] schedule names; UserError if there is none."""
    found = look_up(catalog.SCHEDULES, KEY, name)
    if not isinstance(found, Schedule):
        raise UserError(f"{KEY}={show(name)} is a {type(found).__name__}, not a Schedule.")
    return found
