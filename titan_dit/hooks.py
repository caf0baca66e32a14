"""A user's own code, called as a run goes on: [job] hooks = ["package.module:Class"].

Hooks look and do not touch: what they are given is read-only, and the run is the same with them. An
exception is agreed over the ranks at the end of the step, so that none waits for the one that
raised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from torch import Tensor

from titan_dit import doors
from titan_dit.section import UserError

MOMENTS = ("begun", "step_ended", "validated", "saved", "ended")
KEY = "[job] hooks"


@dataclass(frozen=True)
class Run:
    """What a hook sees of a run."""

    name: str
    folder: Path
    steps: int
    """Of the whole run."""
    rank: int
    num_ranks: int
    config: Mapping[str, Mapping[str, Any]]
    """The resolved config: section -> key -> value."""
    parameters: Mapping[str, Tensor]
    """This rank's shards, detached, under the names of the whole network. Do not change them."""
    step: int = 0
    """Steps done."""
    samples: int = 0
    """Samples from the start of training."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """The newest row of metrics.jsonl, of the last multiple of [metrics] every."""


class Hook:
    """Override what you need; every method is called on every rank, in the same order."""

    rank0: ClassVar[bool] = False
    """True: on the first rank alone, where no collective may be called."""

    def begun(self, run: Run) -> None:
        """Before the first step, after a resume."""

    def step_ended(self, run: Run) -> None:
        """After every step. What it costs, every step costs more."""

    def validated(self, run: Run) -> None:
        """After a validation; its losses are in `run.row`."""

    def saved(self, run: Run) -> None:
        """After a checkpoint has begun to be written."""

    def ended(self, run: Run) -> None:
        """After the last step, or before the ranks stop early."""


class Hooks:
    """The hooks of a run on this rank, and what went wrong in them."""

    def __init__(self, names: Sequence[str], is_first: bool) -> None:
        self.hooks: list[tuple[str, Hook]] = []
        self.wanted = bool(names)
        self.failure: str | None = None
        """What the first hook that raised has raised, on this rank."""
        self.run: Run | None = None
        for name in names:
            kind = doors.look_up({}, KEY, name)
            wrong = sorted(m for m in MOMENTS if not callable(getattr(kind, m, None)))
            if not isinstance(kind, type) or wrong:
                raise UserError(
                    f'{KEY}="{name}": {doors.file_of(kind)} has no class of that name with the '
                    f"methods {', '.join(wrong or MOMENTS)}. Derive it from titan_dit.hooks.Hook."
                )
            if is_first or not getattr(kind, "rank0", False):
                self.hooks.append((name, kind()))

    def origins(self) -> list[str]:
        """A line for every hook: where it was imported from."""
        return [
            f"[job] hook {name} is from {doors.file_of(type(hook))}" for name, hook in self.hooks
        ]

    def show(self, run: Run) -> None:
        """The run that they will see."""
        self.run = run

    def call(self, moment: str, step: int, samples: int, row: Mapping[str, Any]) -> None:
        """Call a method of every hook; the first exception is kept in `failure`."""
        for name, hook in self.hooks:
            assert self.run
            run = replace(self.run, step=step, samples=samples, row=MappingProxyType(dict(row)))
            try:
                getattr(hook, moment)(run)
            except Exception as error:
                what = " ".join(str(error).split()) or "no message"
                self.failure = self.failure or (
                    f'{KEY}="{name}": {moment} raised {type(error).__name__} at step {step} on '
                    f"rank {run.rank}: {what}"
                )
