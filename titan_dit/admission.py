"""What is refused before anything is built, by a UserError, and what a user had better know."""

from __future__ import annotations

from typing import Any

import torch

from titan_dit.config import JobConfig
from titan_dit.data.base import Source
from titan_dit.data.units import scale_hint
from titan_dit.evaluation.generate import check_drawing
from titan_dit.observe.metrics import check_installed
from titan_dit.observe.profile import check_ranks
from titan_dit.parallel.float8_checks import check_device
from titan_dit.parallel.mesh import AxisSizes, solve
from titan_dit.parallel.runtime import World
from titan_dit.pipeline.checks import check_layout
from titan_dit.pipeline.trial import attention_cost
from titan_dit.state import resume


def admit(config: JobConfig[Any, Any, Any], world: World) -> AxisSizes:
    """The layout of these ranks, if they can train what the config says; every rank calls."""
    check_installed(config.metrics)
    # The first rank's view decides, as it does in `Trainer.resume`.
    following = world.gather(resume.has_begun(config.job, config.checkpoint))[0]
    sizes = solve(config.parallel, world.size, following)
    check_layout(config, sizes, following)
    if not following:  # A run that comes back on fewer ranks goes on without them.
        check_ranks(config.profile, world.size)
    check_device(config.precision, config.parallel.async_tp, world.device)
    sampling = config.sampling
    check_drawing(
        config.objective,
        config.model,
        sampling.steps if sampling.every else 1,
        sampling.cfg_channels,
        "[sampling] {}",
    )
    return sizes


def hints(
    config: JobConfig[Any, Any, Any], source: Source, device: torch.device, flops_per_sample: int
) -> list[str]:
    """Lines about what can be trained, but hardly as it was meant. Reads some samples."""
    found = (
        scale_hint(source, config.model.sample_shape[0]),
        attention_cost(config, device, flops_per_sample),
    )
    return [line for line in found if line]
