"""User code called during a run: [job] hooks = ["package.module:Class"].

Hooks are read-only and do not change the run. An exception on any rank stops all ranks after the
same step, without a deadlock: with several ranks after the next step on a CPU, and up to two steps
later on a GPU.
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
from titan_dit.optim.optimizer import shards_of

MOMENTS = ("begun", "step_ended", "validated", "saved", "ended")
KEY = "[job] hooks"


@dataclass(frozen=True)
class Run:
    """A hook's view of the run."""

    name: str
    folder: Path
    steps: int
    """[training] steps."""
    rank: int
    num_ranks: int
    config: Mapping[str, Mapping[str, Any]]
    """The resolved config: section -> key -> value."""
    parameters: Mapping[str, Tensor]
    """This rank's shards, detached, by original names. Do not change them."""
    step: int = 0
    """Finished steps."""
    samples: int = 0
    """Samples since the start of training."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """The newest row of metrics.jsonl."""


class Hook:
    """Base class: override what you need. Methods are called on every rank, in the same order.

    A method must not raise before its last collective: the other ranks would deadlock.
    """

    rank0: ClassVar[bool] = False
    """True: called on rank 0 only, without collectives."""

    def begun(self, run: Run) -> None:
        """Before the first step of a launch."""

    def step_ended(self, run: Run) -> None:
        """After every step; its time adds to the step time."""

    def validated(self, run: Run) -> None:
        """After a validation; its losses are in `run.row`."""

    def saved(self, run: Run) -> None:
        """After the start of a save, which may continue in the background."""

    def ended(self, run: Run) -> None:
        """After the last step, or before the ranks stop early."""


class Hooks:
    """The hooks of this rank, and their first failure."""

    def __init__(self, names: Sequence[str], is_first: bool) -> None:
        self.hooks: list[tuple[str, Hook]] = []
        self.wanted = bool(names)
        self.failure: str | None = None
        self.run: Run | None = None
        for name in names:
            kind = dotted_names.look_up({}, KEY, name)
            wrong = sorted(m for m in MOMENTS if not callable(getattr(kind, m, None)))
            if not isinstance(kind, type) or wrong:
                raise UserError(
                    f'{KEY}="{name}": {dotted_names.file_of(kind)} has no such class '
                    f"with the methods {', '.join(wrong or MOMENTS)}. Derive it from "
                    "titan_dit.hooks.Hook."
                )
            if is_first or not getattr(kind, "rank0", False):
                self.make(name, kind)

    def make(self, name: str, kind: type[Hook]) -> None:
        """Build a hook; keep its exception for `raise_failure`: rank0 hooks run on rank 0 only."""
        try:
            self.hooks.append((name, kind()))
        except (Exception, SystemExit) as error:
            self.failure = f'{KEY}="{name}": building it raised {named(error)}'

    def raise_failure(self, gather: Callable[[str | None], list[str | None]]) -> None:
        """Raise UserError on every rank if a hook failed on any."""
        if self.wanted and (failures := [text for text in gather(self.failure) if text]):
            raise UserError(failures[0])

    def origins(self) -> list[str]:
        """A console line per hook: the file it was imported from."""
        return [
            f"[job] hook {name} is from {dotted_names.file_of(type(hook))}"
            for name, hook in self.hooks
        ]

    def show(self, run: Run) -> None:
        """Set the run that the hooks get, read-only."""
        config = {section: MappingProxyType(dict(table)) for section, table in run.config.items()}
        parameters = MappingProxyType(dict(run.parameters))
        self.run = replace(run, config=MappingProxyType(config), parameters=parameters)

    def call(self, moment: str, step: int, samples: int, row: Mapping[str, Any]) -> None:
        """Call a method of every hook; `failure` keeps the first exception or parameter change."""
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
                    f'{KEY}="{name}": {moment} changed a parameter {where}. Hooks are read-only.'
                )


def named(error: BaseException) -> str:
    """An exception as one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def changes(parameters: Mapping[str, Tensor]) -> int:
    """Number of in-place writes to the parameters."""
    return sum(tensor._version for tensor in shards_of(parameters.values()))
