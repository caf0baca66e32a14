"""The learning rate as a function of the step."""

from __future__ import annotations

import math

from titan_dit.config.training import LRScheduleConfig


def learning_rate(config: LRScheduleConfig, peak: float, step: int, steps: int) -> float:
    """The learning rate of step `step` (1-based) of `steps`: linear warm-up, then decay.

    Warm-up starts at peak / warmup_steps. Decay ends at peak * min_lr_ratio ("constant": peak).
    """
    if step <= config.warmup_steps:
        return peak * step / config.warmup_steps
    if config.decay == "constant":
        return peak
    progress = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
    left = (1 + math.cos(math.pi * progress)) / 2 if config.decay == "cosine" else 1 - progress
    return peak * (config.min_lr_ratio + (1 - config.min_lr_ratio) * left)
