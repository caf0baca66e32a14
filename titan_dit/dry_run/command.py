"""`titan_dit train --config FILE --dry-run [WORLD]`: one process, whatever the world."""

from __future__ import annotations

import math
from dataclasses import asdict, fields
from typing import Any

from titan_dit.config import JobConfig
from titan_dit.dry_run import report
from titan_dit.dry_run.rehearse import rehearse
from titan_dit.observe import console
from titan_dit.parallel.mesh import AxisSizes, solve
from titan_dit.pipeline.checks import check_layout


def dry_run(config: JobConfig[Any, Any, Any], world_size: int | None) -> None:
    """Take a step without devices and print what every rank holds, sends and computes."""
    world_size = world_size or smallest_world(config)
    sizes = solve(config.parallel, world_size)
    check_layout(config, sizes)
    for line in report.lines(rehearse(config, sizes, world_size)):
        console.say(line)


def smallest_world(config: JobConfig[Any, Any, Any]) -> int:
    """The ranks that the config's sizes need; dp_shard=-1 needs one."""
    sizes = asdict(config.parallel)
    return math.prod(max(1, sizes[axis.name]) for axis in fields(AxisSizes))
