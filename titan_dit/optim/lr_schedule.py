"""The learning rate as a function of the step: linear warm-up, then a decay by name.

Definitions as in Megatron-LM's OptimizerParamScheduler, with steps from 1 on, so that the first
step of a warm-up has a rate above 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

from titan_dit.config import catalog, dotted_names
from titan_dit.config.section import UserError
from titan_dit.config.training import LRSchedulerConfig

Law: TypeAlias = Callable[[float, float, float, LRSchedulerConfig], float]
"""(step, warm-up steps, last step of the decay, [lr_scheduler]) -> learning rate over the peak."""


def learning_rate(config: LRSchedulerConfig, peak: float, step: int, steps: int) -> float:
    """The learning rate of step `step` (1-based) of `steps`.

    Warm-up starts at peak / warmup_steps. A decay ends at peak * min_lr_ratio, and stays there.
    """
    warmup, end = bounds(config, steps)
    if step <= warmup:
        return peak * step / warmup
    return peak * law_of(config)(step, warmup, end, config)


def bounds(config: LRSchedulerConfig, steps: int) -> tuple[float, float]:
    """The last steps of the warm-up and of the decay."""
    end = config.decay_steps or steps
    # Megatron's lr-warmup-fraction is one of lr-decay-iters, too.
    return config.warmup_fraction * end if config.warmup_fraction else config.warmup_steps, end


def law_of(config: LRSchedulerConfig) -> Law:
    """The decay function of [lr_scheduler] decay. Raises UserError if there is none."""
    law: Law = dotted_names.look_up(catalog.LR_DECAYS, "[lr_scheduler] decay", config.decay)
    return law


def check(config: LRSchedulerConfig, steps: int) -> None:
    """Raise UserError if a run of `steps` steps cannot have these rates."""
    law_of(config)
    warmup, end = bounds(config, steps)
    if config.wsd_decay_steps and config.wsd_decay_steps > end - warmup:
        raise UserError(
            f"[lr_scheduler] wsd_decay_steps={config.wsd_decay_steps} begins before the end of the "
            f"warm-up, step {warmup:g} of {end:g}. Set at most {max(1, int(end - warmup))}."
        )


def constant(step: float, warmup: float, end: float, config: LRSchedulerConfig) -> float:
    """The peak rate at every step: a factor of 1."""
    return 1.0


def linear(step: float, warmup: float, end: float, config: LRSchedulerConfig) -> float:
    """A line from the peak at the end of the warm-up to the minimum rate at `end`."""
    return between(1 - progress(step, warmup, end), config)


def cosine(step: float, warmup: float, end: float, config: LRSchedulerConfig) -> float:
    """Half a cosine (arXiv:1608.03983 sec. 3, without restarts)."""
    return between((1 + math.cos(math.pi * progress(step, warmup, end))) / 2, config)


def wsd(step: float, warmup: float, end: float, config: LRSchedulerConfig) -> float:
    """Warm-up, stable, decay: the peak until `wsd_decay_steps` before `end` (arXiv:2404.06395)."""
    done = progress(step, end - (config.wsd_decay_steps or 0), end)
    left = {
        "linear": 1 - done,
        "cosine": (1 + math.cos(math.pi * done)) / 2,
        "exponential": 2 * 0.5**done - 1,
        "minus_sqrt": 1 - math.sqrt(done),
    }
    return between(left[config.wsd_decay], config)


def inverse_square_root(step: float, warmup: float, end: float, config: LRSchedulerConfig) -> float:
    """sqrt(warm-up / step), but no less than the minimum rate (arXiv:1706.03762 sec. 5.3)."""
    if step > end:
        return config.min_lr_ratio
    return max(config.min_lr_ratio, math.sqrt(max(warmup, 1) / step))


def progress(step: float, begin: float, end: float) -> float:
    """The part of a decay that is done, from 0 to 1."""
    return min(1.0, max(0.0, (step - begin) / max(1, end - begin)))


def between(left: float, config: LRSchedulerConfig) -> float:
    """Interpolate from the minimum rate (`left` = 0) to the peak (1)."""
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * left
