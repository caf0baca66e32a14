"""Exponential moving averages of (sharded) weights, in fp32, on the shards themselves."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_dit.config import EMAConfig


class EMA:
    """One average per decay; `averages` maps the decay, written out, to name -> tensor."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: EMAConfig) -> None:
        self.config = config
        self.parameters = dict(parameters)
        self.averages: dict[str, dict[str, Tensor]] = {
            str(decay): {name: p.detach().clone() for name, p in parameters.items()}
            for decay in config.decays
        }

    def decay(self, decay: float, step: int) -> float:
        """The decay of the update after step `step` (1-based); during the warm-up it is less."""
        if self.config.warmup:
            update = step // self.config.every
            decay = min(decay, (1 + update) / (10 + update))
        return float(decay**self.config.every)

    @torch.no_grad()
    def restart(self, except_for: Collection[str]) -> None:
        """Set every average to the weights, but for those named by their decay."""
        for decay, average in self.averages.items():
            if decay not in except_for:
                torch._foreach_copy_(local(average), local(self.parameters))

    @torch.no_grad()
    def spread(self) -> None:
        """Set every average to the first one."""
        averages = [local(average) for average in self.averages.values()]
        for average in averages[1:]:
            torch._foreach_copy_(average, averages[0])

    @torch.no_grad()
    def update(self, step: int, skip: Tensor) -> None:
        """Move every average towards the weights; where `skip` is true, not at all."""
        if step % self.config.every:
            return
        weights = local(self.parameters)
        for decay, average in zip(self.config.decays, self.averages.values(), strict=True):
            # A tensor, not a number: whether to skip is known on the device only.
            share = (1 - self.decay(decay, step)) * (1 - skip.float())
            torch._foreach_lerp_(local(average), weights, [share] * len(weights))

    @contextmanager
    @torch.no_grad()
    def swapped_in(self) -> Iterator[None]:
        """Within the block the model's weights are the first average; without EMA, its own."""
        if not self.averages:
            yield
            return
        average, weights = local(next(iter(self.averages.values()))), local(self.parameters)
        kept = [weight.clone() for weight in weights]
        torch._foreach_copy_(weights, average)
        try:
            yield
        finally:
            torch._foreach_copy_(weights, kept)


def local(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """This rank's shards: the average of a shard needs no other rank."""
    return [
        t.to_local().detach() if isinstance(t, DTensor) else t.detach() for t in tensors.values()
    ]
