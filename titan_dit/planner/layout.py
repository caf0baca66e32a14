"""What a search finds: the fastest layout of every mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, replace

from titan_dit.plan import RunPlan
from titan_dit.planner.candidates import Candidate
from titan_dit.planner.memory import Needed
from titan_dit.planner.step import Estimate
from titan_dit.planner.weighing import Held


@dataclass(frozen=True)
class Layout:
    """A candidate that fits, with its predicted step and memory."""

    candidate: Candidate
    plan: RunPlan
    estimate: Estimate
    held: Held
    """Bytes by kind of the pipeline rank that needs most, at its peak."""
    needed: Needed
    rank: int
    """That pipeline rank."""
    is_rehearsed: bool = False
    """Its memory is that of a whole fake step."""


@dataclass
class Tally:
    """What a search did."""

    candidates: int = 0
    bounded: int = 0
    """Candidates with a bound from counts of their own."""
    weighed: int = 0
    """Candidates whose memory was composed."""
    too_large: int = 0
    """Those that do not fit."""
    estimated: int = 0
    seconds: float = 0.0

    def after(self, other: Tally) -> Tally:
        """The sums of two searches over the same candidates."""
        found = Tally(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))
        return replace(found, candidates=self.candidates)


@dataclass
class Outcome:
    """The layouts that were found."""

    rows: list[Layout]
    """The fastest of every mesh, the fastest first."""
    tally: Tally
    notes: list[str] = field(default_factory=list)


def mesh_of(candidate: Candidate) -> tuple[object, ...]:
    """What one row of the table is about: the sizes of the axes, and the cp method."""
    return (*candidate[:5], candidate.cp_method if candidate.cp > 1 else "")


def kind_of(candidate: Candidate) -> object:
    """Layouts of one mesh, mode and format: their composed memory errs alike."""
    return mesh_of(candidate), candidate.mode, candidate.float8


def equals(rows: Sequence[Layout], error: float) -> list[Layout]:
    """Rows within the error of the fastest."""
    best = min(row.estimate.seconds for row in rows)
    return [row for row in rows if row.estimate.seconds <= best * (1 + error)]
