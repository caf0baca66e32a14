"""An order as text: "2F0" is stage 2, forward, microbatch 0; one CSV row per rank.

The notation is torch's: `_Action.from_str` of torch.distributed.pipelining reads one action,
`_PipelineScheduleRuntime._load_csv(..., format="compute_only")` a file.
"""

import re

from titan_dit.pipeline.schedules.schedule import Action, Kind


def render(order):
    return [[str(action) for action in actions] for actions in order]


def to_csv(order):
    return "".join(",".join(row) + "\n" for row in render(order))


def parse(text):
    stage, kind, microbatch = re.fullmatch(r"(\d+)([FBIW])(\d+)", text).groups()
    return Action(Kind(kind), int(stage), int(microbatch))


def from_csv(text):
    return tuple(tuple(map(parse, line.split(","))) for line in text.splitlines())
