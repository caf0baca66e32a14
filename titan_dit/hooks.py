"""A user's own code, called as a run goes on: [job] hooks = ["package.module:Class"].

Hooks look and do not touch: what they are given is read-only, and the run is the same with them. An
exception is agreed over the ranks at the end of the step, so that none waits for the one that
raised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from torch import Tensor

from titan_dit.config import dotted_names
from titan_dit.config.section import UserError
from titan_dit.optim.ema import local

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
    """The newest row of metrics.jsonl."""


class Hook:
    """Override what you need; every method is called on every rank, in the same order.

    A method that calls collectives must not raise before the last of them: the other ranks would
    wait in it.
    """

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
            kind = dotted_names.look_up({}, KEY, name)
            wrong = sorted(m for m in MOMENTS if not callable(getattr(kind, m, None)))
            if not isinstance(kind, type) or wrong:
                raise UserError(
                    f'{KEY}="{name}": {dotted_names.file_of(kind)} has no class of that name '
                    f"with the methods {', '.join(wrong or MOMENTS)}. Derive it from "
                    "titan_dit.hooks.Hook."
                )
            if is_first or not getattr(kind, "rank0", False):
                self.make(name, kind)

    def make(self, name: str, kind: type[Hook]) -> None:
        """Build a hook; what that raises is kept, as other ranks may not build it."""
        try:
            self.hooks.append((name, kind()))
        except (Exception, SystemExit) as error:
            self.failure = f'{KEY}="{name}": building it raised {named(error)}'

    def raise_failure(self, gather: Callable[[str | None], list[str | None]]) -> None:
        """Raise UserError, on every rank, if a hook has raised on any of them."""
        if self.wanted and (failures := [text for text in gather(self.failure) if text]):
            raise UserError(failures[0])

    def origins(self) -> list[str]:
        """A line for every hook: where it was imported from."""
        return [
            f"[job] hook {name} is from {dotted_names.file_of(type(hook))}"
            for name, hook in self.hooks
        ]

    def show(self, run: Run) -> None:
        """The run that they will see."""
        config = {section: MappingProxyType(dict(table)) for section, table in run.config.items()}
        parameters = MappingProxyType(dict(run.parameters))
        self.run = replace(run, config=MappingProxyType(config), parameters=parameters)

    def call(self, moment: str, step: int, samples: int, row: Mapping[str, Any]) -> None:
        """Call a method of every hook; the first exception is kept in `failure`.

        A hook that has changed a parameter has failed too.
        """
        for name, hook in self.hooks:
            assert self.run
            run = replace(self.run, step=step, samples=samples, row=MappingProxyType(dict(row)))
            where, before = f"at step {step} on rank {run.rank}", changes(run.parameters)
            try:
                getattr(hook, moment)(run)
            except (Exception, SystemExit) as error:
                failure = f'{KEY}="{name}": {moment} raised {where}: {named(error)}'
                self.failure = self.failure or failure
            if changes(run.parameters) != before:
                self.failure = self.failure or (
                    f'{KEY}="{name}": {moment} changed a parameter {where}. Hooks may only look.'
                )


def named(error: BaseException) -> str:
    """An exception in a line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def changes(parameters: Mapping[str, Tensor]) -> int:
    """Counts what was written in place to them."""
    return sum(tensor._version for tensor in local(parameters))
