"""The loss scale of [precision] dtype = "fp16": a factor on the loss's gradient.

fp16 holds no value below 6e-8: small gradients would become 0. With the factor they do not, and
clipping divides by it (`clip_norm`). If the factor is too large, gradients become infinite: the
step is skipped and the factor halved, so that it stays near the largest possible one
(arXiv:1710.03740 sec. 3.2). The rule is that of Megatron-LM, except for LARGEST_NORM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from titan_dit.config.layout import MAX_LOSS_SCALE, PrecisionConfig

LARGEST_NORM = 65504.0
"""The largest number in fp16: a greater norm of the scaled gradients is an overflow, too.

Which sums are in fp16 depends on the layout, and so does which of them overflow. Below this norm no
summed gradient does; above it every layout skips the step."""


class LossScale:
    """A scalar on the device, equal on all ranks: it follows from the global gradient norms."""

    def __init__(self, config: PrecisionConfig, device: torch.device) -> None:
        self.config = config
        self.least = config.loss_scale or config.loss_scale_min
        """Minimum scale, at which a norm that is not finite is a bad step, not an overflow."""
        start = config.loss_scale or config.loss_scale_init
        # Replaced by each update, never changed in place: the guard's unread steps refer to them.
        self.value = torch.full((), start, dtype=torch.float32, device=device)
        self.num_good = torch.zeros((), device=device)
        """Steps since the last overflow or the last doubling of the scale."""
        self.tolerated = torch.full((), self.num_tolerated, device=device)
        """Remaining overflows that do not halve the scale; reset when it doubles."""

    @classmethod
    def of(cls, config: PrecisionConfig, device: torch.device) -> LossScale | None:
        """The loss scale of fp16; None for other formats, which need none."""
        return cls(config, device) if config.dtype == "fp16" else None

    @property
    def num_tolerated(self) -> float:
        """Value of `tolerated` after the scale has doubled: hysteresis - 1."""
        return self.config.loss_scale_hysteresis - 1.0

    def update(self, grad_norm: Tensor) -> Tensor:
        """Adapt to a step's norm of the unscaled gradients; return True if it is an overflow.

        Scalars on the device; no synchronisation. At the minimum scale there are no overflows.
        """
        if self.config.loss_scale:
            return torch.zeros_like(grad_norm, dtype=torch.bool)
        # Not ">": every comparison with NaN is false.
        overflows = ~(grad_norm * self.value <= LARGEST_NORM) & (self.value > self.least)
        self._adapt(overflows | ~grad_norm.isfinite())
        return overflows

    def _adapt(self, fails: Tensor) -> None:
        halves = fails & (self.tolerated <= 0)
        num_good = torch.where(fails, 0.0, self.num_good + 1)
        grows = num_good >= self.config.loss_scale_window
        # 2 to a power of -1, 0 or 1.
        value = self.value * torch.exp2(grows.float() - halves.float())
        self.value = value.clamp(self.least, MAX_LOSS_SCALE)
        self.num_good = torch.where(grows, 0.0, num_good)
        left = (self.tolerated - fails.float()).clamp(min=0.0)
        self.tolerated = torch.where(grows, self.num_tolerated, left)

    def state(self) -> dict[str, float]:
        """Plain values for a checkpoint; synchronises the device."""
        return {
            "value": self.value.item(),
            "num_good": self.num_good.item(),
            "tolerated": self.tolerated.item(),
        }

    def load(self, saved: Mapping[str, Any] | None) -> None:
        """Load the values of `state`; None, from a run that was not in fp16, starts anew."""
        fresh = LossScale(self.config, self.value.device)
        self.value, self.num_good, self.tolerated = fresh.value, fresh.num_good, fresh.tolerated
        if saved and not self.config.loss_scale:
            device = self.value.device
            # The run may resume with another loss_scale_min.
            self.value = torch.full((), max(saved["value"], self.least), device=device)
            self.num_good = torch.full((), saved["num_good"], device=device)
            self.tolerated = torch.full((), saved["tolerated"], device=device)
