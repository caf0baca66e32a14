"""Files of orders and of measured costs.

An order is a CSV file with a line for each rank: its actions in sequence, as torch writes them.
"2F0" is stage 2, forward, microbatch 0; B is a full backward, I and W its two halves. Lines that
begin with # are comments. A file of torch's may also have bubbles (empty cells), overlapped actions
("(2F0;3B1)OVERLAP_F_B") and messages ("2SEND_F0"), which only torch's runtime performs.

Measured costs are JSON: seconds of every action, and of a message from rank to rank. A profile of a
pipeline writes `RUN/profile/timeline-steps-A-B.costs.json` (pipeline/timeline.py), `pipeline plan`
reads the newest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from titan_dit.config import user_text
from titan_dit.config.section import UserError, show
from titan_dit.pipeline.schedules.schedule import Action, Kind, Order
from titan_dit.system import run_files
from titan_dit.system.files import write_json, write_whole

MAX_ORDER_BYTES = 16 << 20
ORDER_REMEDY = 'Write it by `python -m titan_dit pipeline plan`, or set order = "planned".'
ACTION = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})", re.ASCII)
OVERLAPPED = re.compile(r"\(([^();]+);([^();]+)\)OVERLAP_F_B")
MESSAGE = re.compile(r"\d{1,9}(SEND|RECV)_[FB]\d{1,9}", re.ASCII)
"""A send or the receive of a message."""
LEFT_OUT = re.compile(
    r"\d{1,9}(WAIT_SEND_[FB]\d{1,9}|UNSHARD|RESHARD|(WAIT_)?REDUCE_GRAD)", re.ASCII
)
"""Cells that only some versions of torch write. They are ignored: parameters stay gathered for a
pass, and each stage's gradients are reduced after its last backward."""


def write_order(path: Path, order: Order, comments: Iterable[str] = ()) -> None:
    """Write an order, whole or not at all; each comment is a line at the top."""
    lines = [f"# {comment}" for comment in comments]
    lines += [",".join(map(str, actions)) for actions in order]
    write_whole(path, "\n".join(lines) + "\n")


class OrderFile(NamedTuple):
    """The content of an order file."""

    order: Order
    """The computations."""
    cells: tuple[tuple[str, ...], ...]
    """Computations and messages of every rank, as written."""

    @property
    def has_messages(self) -> bool:
        """The file says, too, when messages are posted, as torch's "compute_comms" files do."""
        return any(MESSAGE.fullmatch(cell) for row in self.cells for cell in row)


def read_order(path: Path) -> OrderFile:
    """Read an order. Raises UserError unless it is a file of actions; see `proof.check`, too."""
    where = f"[pipeline] order={show(str(path))}"
    try:
        text = user_text.read(path, where, MAX_ORDER_BYTES)
    except UserError as error:
        raise UserError(f"{error} {ORDER_REMEDY}") from None
    order, rows = [], []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            cells = [cell for cell in map(str.strip, line.split(",")) if cell]
            row = tuple(cell for cell in cells if not LEFT_OUT.fullmatch(cell))
            at = f"{where}: line {number}"
            computed = (cell for cell in row if not MESSAGE.fullmatch(cell))
            order.append(tuple(action for cell in computed for action in _actions(cell, at)))
            rows.append(row)
    if not any(order):
        raise UserError(f"{where} has no actions. {ORDER_REMEDY}")
    return OrderFile(tuple(order), tuple(rows))


def _actions(cell: str, where: str) -> Iterator[Action]:
    """The action of a cell, or the two that overlap."""
    found = OVERLAPPED.fullmatch(cell)
    for name in found.groups() if found else (cell,):
        try:
            yield action_of(name.strip())
        except ValueError:
            shown = cell if len(cell) <= 20 else f"{cell[:20]}..."
            raise UserError(
                f"{where}: {show(shown)} is not an action: stage, F, B, I or W, microbatch, such "
                f'as "0F0". {ORDER_REMEDY}'
            ) from None


def action_of(text: str) -> Action:
    """An action by its name; ValueError if it is none."""
    found = ACTION.fullmatch(text)
    if not found:
        raise ValueError(f"{text!r} is not an action")
    return Action(Kind(found[2]), int(found[1]), int(found[3]))


COSTS_FORMAT = 1
COSTS_NAME = re.compile(r"timeline-steps-(\d+)-(\d+)\.costs\.json")


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
    latencies: Mapping[tuple[int, int], float]
    """(source, target) -> seconds from the end of an action to the arrival of its output."""
    step_s: float
    """Seconds of the measured pass over all microbatches."""

    @property
    def num_ranks(self) -> int:
        """Pipeline ranks."""
        return len(self.order)

    def latency(self, source: int, target: int) -> float:
        """Seconds from `source` to `target`, for the simulator; 0 if it was not measured."""
        return self.latencies.get((source, target), 0.0)


def newest_costs(run: Path) -> Path:
    """The profile of the run's last steps. Raises UserError if there is none."""
    folder = run / run_files.PROFILE
    names = folder.iterdir() if folder.is_dir() else ()
    found = {path: COSTS_NAME.fullmatch(path.name) for path in names}
    spans = [(int(m[2]), int(m[1]), path) for path, m in found.items() if m]
    if not spans:
        where = f"no timeline-steps-*.costs.json in {folder}" if run.is_dir() else "no such folder"
        raise UserError(
            f"--run {run}: {where}. Train the run a few steps with --profile.enabled true and "
            "[parallel] pp above 1."
        )
    return max(spans)[2]


def write_costs(path: Path, costs: MeasuredCosts) -> None:
    """Write measured costs."""
    by_stage: dict[str, list[float | None]] = {}
    for action, seconds in costs.seconds.items():
        name = f"{action.stage}{action.kind}"
        by_stage.setdefault(name, [None] * costs.num_microbatches)[action.microbatch] = seconds
    content = {
        "format": COSTS_FORMAT,
        "stage_ranks": list(costs.stage_ranks),
        "num_microbatches": costs.num_microbatches,
        "splits_backward": any(action.kind is Kind.BACKWARD_INPUT for action in costs.seconds),
        "order": [[str(action) for action in actions] for actions in costs.order],
        "actions": by_stage,
        "links": {f"{source}->{target}": s for (source, target), s in costs.latencies.items()},
        "step_s": costs.step_s,
    }
    write_json(path, content, indent=1)


def read_costs(path: Path) -> MeasuredCosts:
    """Read measured costs. Raises UserError if it is damaged or of another format."""
    text = user_text.read(path, str(path))
    try:
        content = user_text.parse_json(text)
        number = content["format"]
        costs = parsed_costs(content) if number == COSTS_FORMAT else None
    except (ArithmeticError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise UserError(
            f"{path} is no whole costs file ({type(error).__name__}: {error}). Profile the run "
            "again: --profile.enabled true."
        ) from None
    if costs is None:
        raise UserError(
            f"{path} has format={number}, but this titan_dit reads {COSTS_FORMAT}. Profile the run "
            "again: --profile.enabled true."
        )
    return costs


def parsed_costs(content: Mapping[str, Any]) -> MeasuredCosts:
    """The costs from the content of a file."""
    order = tuple(tuple(map(action_of, row)) for row in content["order"])
    by_stage = {name: list(values) for name, values in content["actions"].items()}
    seconds = {
        action: seconds_of(by_stage[f"{action.stage}{action.kind}"], action)
        for actions in order
        for action in actions
    }
    latencies = {}
    for name, value in content["links"].items():
        source, target = map(int, name.split("->"))
        latencies[source, target] = max(0.0, float(value))
    return MeasuredCosts(
        stage_ranks=tuple(map(int, content["stage_ranks"])),
        num_microbatches=int(content["num_microbatches"]),
        order=order,
        seconds=seconds,
        latencies=latencies,
        step_s=float(content["step_s"]),
    )


def seconds_of(values: list[float | None], action: Action) -> float:
    """The seconds of one action; ValueError if they are missing."""
    value = values[action.microbatch]
    if value is None:
        raise ValueError(f"{action} was not measured")
    return float(value)
