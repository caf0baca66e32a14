"""Measured costs of a run's pipeline as JSON: seconds of every action and link.

A profile of a pipeline writes `RUN/profile/timeline-steps-A-B.costs.json` (observe/timeline.py);
`pipeline plan` reads the newest.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_dit.config import user_text
from titan_dit.config.section import UserError
from titan_dit.schedules.action import Action, Kind, Order
from titan_dit.schedules.order_file import ACTION
from titan_dit.system import run_files
from titan_dit.system.files import write_json

FORMAT = 1
NAME = re.compile(r"timeline-steps-(\d+)-(\d+)\.costs\.json")


@dataclass(frozen=True)
class MeasuredCosts:
    """Medians over the steps of a profile, in seconds."""

    stage_ranks: tuple[int, ...]
    """The pipeline rank of every stage."""
    num_microbatches: int
    order: Order
    """The actions of every rank, as they ran."""
    seconds: Mapping[Action, float]
    """Seconds of every action of the order."""
    links: Mapping[tuple[int, int], float]
    """(source, target) -> seconds from the end of an action to the arrival of its output."""
    step_s: float
    """Seconds of the measured pass over all microbatches."""

    @property
    def num_ranks(self) -> int:
        """Pipeline ranks."""
        return len(self.order)

    def latency(self, source: int, target: int) -> float:
        """Seconds from `source` to `target`, for the simulator; 0 if it was not measured."""
        return self.links.get((source, target), 0.0)


def newest(run: Path) -> Path:
    """The profile of the run's last steps. Raises UserError if there is none."""
    folder = run / run_files.PROFILE
    names = folder.iterdir() if folder.is_dir() else ()
    found = {path: NAME.fullmatch(path.name) for path in names}
    spans = [(int(m[2]), int(m[1]), path) for path, m in found.items() if m]
    if not spans:
        where = f"no timeline-steps-*.costs.json in {folder}" if run.is_dir() else "no such folder"
        raise UserError(
            f"--run {run}: {where}. Train the run a few steps with --profile.enabled true and "
            "[parallel] pp above 1."
        )
    return max(spans)[2]


def write(path: Path, costs: MeasuredCosts) -> None:
    """Write the file."""
    by_stage: dict[str, list[float | None]] = {}
    for action, seconds in costs.seconds.items():
        name = f"{action.stage}{action.kind}"
        by_stage.setdefault(name, [None] * costs.num_microbatches)[action.microbatch] = seconds
    content = {
        "format": FORMAT,
        "stage_ranks": list(costs.stage_ranks),
        "num_microbatches": costs.num_microbatches,
        "splits_backward": any(action.kind is Kind.BACKWARD_INPUT for action in costs.seconds),
        "order": [[str(action) for action in actions] for actions in costs.order],
        "actions": by_stage,
        "links": {f"{source}->{target}": s for (source, target), s in costs.links.items()},
        "step_s": costs.step_s,
    }
    write_json(path, content, indent=1)


def read(path: Path) -> MeasuredCosts:
    """Read the file. Raises UserError if it is damaged or of another format."""
    text = user_text.read(path, str(path))
    try:
        content = user_text.parse_json(text)
        number = content["format"]
        costs = parsed(content) if number == FORMAT else None
    except (ArithmeticError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise UserError(
            f"{path} is no whole costs file ({type(error).__name__}: {error}). Profile the run "
            "again: --profile.enabled true."
        ) from None
    if costs is None:
        raise UserError(
            f"{path} has format={number}, but this titan_dit reads {FORMAT}. Profile the run "
            "again: --profile.enabled true."
        )
    return costs


def parsed(content: Mapping[str, Any]) -> MeasuredCosts:
    """The costs from the content of a file."""
    order = tuple(tuple(map(action_of, row)) for row in content["order"])
    by_stage = {name: list(values) for name, values in content["actions"].items()}
    seconds = {
        action: seconds_of(by_stage[f"{action.stage}{action.kind}"], action)
        for actions in order
        for action in actions
    }
    links = {}
    for name, value in content["links"].items():
        source, target = map(int, name.split("->"))
        links[source, target] = max(0.0, float(value))
    return MeasuredCosts(
        stage_ranks=tuple(map(int, content["stage_ranks"])),
        num_microbatches=int(content["num_microbatches"]),
        order=order,
        seconds=seconds,
        links=links,
        step_s=float(content["step_s"]),
    )


def action_of(text: str) -> Action:
    """An action by its name; ValueError if it is none."""
    found = ACTION.fullmatch(text)
    if not found:
        raise ValueError(f"{text!r} is not an action")
    return Action(Kind(found[2]), int(found[1]), int(found[3]))


def seconds_of(values: list[float | None], action: Action) -> float:
    """The seconds of one action; ValueError if they are missing."""
    value = values[action.microbatch]
    if value is None:
        raise ValueError(f"{action} was not measured")
    return float(value)
