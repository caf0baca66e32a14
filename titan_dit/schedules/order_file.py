"""Orders as CSV files: a line for each rank, its actions in sequence as torch writes them.

"2F0" is stage 2, forward, microbatch 0; B is a full backward, I and W its two halves. Lines that
begin with # are comments.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from titan_dit.config import user_text
from titan_dit.config.section import UserError, show
from titan_dit.schedules.action import Action, Kind, Order
from titan_dit.system.files import write_whole

MAX_BYTES = 16 << 20
ACTION = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})", re.ASCII)


def write(path: Path, order: Order, comments: Iterable[str] = ()) -> None:
    """Write an order, whole or not at all; each comment is a line at the top."""
    lines = [f"# {comment}" for comment in comments]
    lines += [",".join(map(str, actions)) for actions in order]
    write_whole(path, "\n".join(lines) + "\n")


def read(path: Path) -> Order:
    """Read an order. Raises UserError unless it is a file of actions; see `proof.check`, too."""
    where = f"[pipeline] order={show(str(path))}"
    try:
        text = user_text.read(path, where, MAX_BYTES)
    except UserError as error:
        raise UserError(f"{error} {REMEDY}") from None
    order = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            cells = [cell.strip() for cell in line.strip().rstrip(",").split(",")]
            order.append(tuple(_action(cell, f"{where}: line {number}") for cell in cells))
    if not order:
        raise UserError(f"{where} has no actions. {REMEDY}")
    return tuple(order)


REMEDY = 'Write it by `python -m titan_dit pipeline plan`, or set order = "planned".'


def _action(cell: str, where: str) -> Action:
    found = ACTION.fullmatch(cell)
    if not found:
        shown = cell if len(cell) <= 20 else f"{cell[:20]}..."
        raise UserError(
            f"{where}: {show(shown)} is not an action: stage, F, B, I or W, microbatch, such as "
            f'"0F0". {REMEDY}'
        )
    stage, kind, microbatch = found.groups()
    return Action(Kind(kind), int(stage), int(microbatch))
