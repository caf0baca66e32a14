"""Flags of `pipeline draw`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from titan_dit.config.catalog import SCHEDULES
from titan_dit.config.section import (
    Bound,
    NonNegativeFloat,
    NonNegativeInt,
    OneOf,
    OutputPath,
    PositiveFloat,
    Section,
)

COMMAND = "pipeline draw"


@dataclass(frozen=True, kw_only=True)
class Options(Section):
    """Draw a simulated schedule in planned order and in run-time order (docs/pipelines.md).

    The unit of time is a forward of one microbatch through the layers of one rank. The gradients of
    the inputs and of the weights take one each.
    """

    section = COMMAND

    out: OutputPath
    """FILE.png to write."""
    schedule: Annotated[str, OneOf(tuple(SCHEDULES))] = "interleaved_zero_bubble"
    """As [pipeline] schedule."""
    virtual_stages: Annotated[int, Bound(least=1, most=64)] | None = None
    """Stages per rank of an interleaved schedule. Default: 2."""
    ranks: Annotated[int, Bound(least=1, most=1024)] = 4
    """Pipeline ranks."""
    microbatches: Annotated[int, Bound(least=1, most=1024)] = 8
    """Microbatches of a step."""
    memory: Annotated[float, Bound(least=1, most=1e6)] = 1.0
    """As [pipeline] memory: of run-time order and of the plan."""
    lengths: tuple[PositiveFloat, ...] = ()
    """Factors on the microbatches, in turn: --lengths 1 1 3 makes every third one long."""
    slowness: tuple[PositiveFloat, ...] = ()
    """Factors on the ranks, in turn."""
    latency: NonNegativeFloat = 0.0
    """Time of a message between ranks."""
    jitter: Annotated[float, Bound(least=0, most=10)] = 0.0
    """Standard deviation of the log of a random factor on every time."""
    seed: NonNegativeInt = 0
    """Of the jitter."""
    plan: bool = False
    """Also draw what `pipeline plan` makes of these times; it knows nothing of the jitter."""
