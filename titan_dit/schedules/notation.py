"""An order as text: "2F0" is stage 2, forward, microbatch 0; one CSV row per rank.

The notation is torch's: `_Action.from_str` of torch.distributed.pipelining reads one action,
`_PipelineScheduleRuntime._load_csv(..., format="compute_only")` a file.
"""

from __future__ import annotations

import re

from titan_dit.schedules.action import Action, Kind, Order

ACTION = re.compile(r"(\d+)([FBIW])(\d+)", re.ASCII)


def render(order: Order) -> list[list[str]]:
    """Every action as text, rank by rank."""
    return [[str(action) for action in actions] for actions in order]


def to_csv(order: Order) -> str:
    """The whole order: a row per rank, its actions with commas between them."""
    return "".join(",".join(row) + "\n" for row in render(order))


def parse(text: str) -> Action:
    """The action that `text` names. Raises ValueError for anything but a plain computation."""
    if not (match := ACTION.fullmatch(text.strip())):
        raise ValueError(f"{text!r} is no action: write stage, one of F B I W, microbatch: 2F0.")
    stage, kind, microbatch = match.groups()
    return Action(Kind(kind), int(stage), int(microbatch))


def from_csv(text: str) -> Order:
    """The inverse of `to_csv`; empty cells, which torch writes for a rank that waits, are left out.

    Nothing is proven of the order: see `check`.
    """
    return tuple(
        tuple(parse(cell) for cell in line.split(",") if cell.strip()) for line in text.splitlines()
    )
