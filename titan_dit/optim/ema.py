"""Exponential moving averages of (sharded) weights, in fp32, shard by shard."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_dit.config.training import EMAConfig

CHUNK = 2**25
"""Elements that `move_in_chunks` takes at a time: 128 MiB of temporary memory in fp32."""


class EMA:
    """One average per decay.

    An update is memory-bound (12 bytes per parameter): on a GPU it can overlap the next forward
    (`run_beside`).
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: EMAConfig) -> None:
        self.config = config
        self.parameters = dict(parameters)
        self._averages: dict[str, dict[str, Tensor]] = {
            str(decay): {name: p.detach().clone() for name, p in parameters.items()}
            for decay in config.decays
        }
        self._beside: torch.cuda.Stream | None = None

    @property
    def averages(self) -> dict[str, dict[str, Tensor]]:
        """str(decay) -> name -> tensor, after any update in flight."""
        self.settle()
        return self._averages

    def run_beside(self, optimizer: torch.optim.Optimizer) -> None:
        """Run updates on a side stream; optimizer steps wait for them."""
        if self._averages and any(p.is_cuda for p in self.parameters.values()):
            self._beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            optimizer.register_step_pre_hook(lambda *_: self.settle())

    def settle(self) -> None:
        """Make the current stream wait for the last update."""
        if self._beside is not None:
            torch.cuda.current_stream().wait_stream(self._beside)

    def decay(self, decay: float, step: int) -> float:
        """Decay of the update after `step` (1-based): (`decay`, less in warm-up) ** [ema] every."""
        if self.config.warmup:
            update = step // self.config.every
            decay = min(decay, (1 + update) / (10 + update))
        return float(decay**self.config.every)

    @torch.no_grad()
    def restart(self, except_for: Collection[str]) -> None:
        """Reset every average to the weights, except the decays `except_for`."""
        for decay, average in self.averages.items():
            if decay not in except_for:
                torch._foreach_copy_(local(average), local(self.parameters))

    @torch.no_grad()
    def copy_first_to_all(self) -> None:
        """Copy the first average to all others."""
        averages = [local(average) for average in self.averages.values()]
        for average in averages[1:]:
            torch._foreach_copy_(average, averages[0])

    @torch.no_grad()
    def update(self, step: int, skip: Tensor) -> None:
        """Update all averages if [ema] every divides `step`, unless `skip` (on device) is true."""
        if step % self.config.every:
            return
        if self._beside is None:
            self._update(step, skip)
            return
        self._beside.wait_stream(torch.cuda.current_stream())
        skip.record_stream(self._beside)
        with torch.cuda.stream(self._beside):
            self._update(step, skip)

    def _update(self, step: int, skip: Tensor) -> None:
        weights = local(self.parameters)
        move = move_in_chunks if skip.is_cuda else move_one_by_one
        for decay, average in zip(self.config.decays, self._averages.values(), strict=True):
            # A tensor: reading `skip` on the host would synchronise.
            share = (1 - self.decay(decay, step)) * (1 - skip.float())
            move(local(average), weights, share)

    @contextmanager
    @torch.no_grad()
    def swapped_in(self, decay: str | None = None) -> Iterator[None]:
        """Swap an average into the model's weights inside the block; a no-op without EMA.

        `decay`: a key of `averages`; None takes the first.
        """
        averages = self.averages
        if not averages:
            yield
            return
        chosen = averages[next(iter(averages)) if decay is None else decay]
        average, weights = local(chosen), local(self.parameters)
        kept = [weight.clone() for weight in weights]
        torch._foreach_copy_(weights, average)
        try:
            yield
        finally:
            torch._foreach_copy_(weights, kept)


def move_one_by_one(averages: list[Tensor], weights: list[Tensor], share: Tensor) -> None:
    """Add share (weights - averages): a kernel per tensor, no temporary memory.

    `share`: a scalar on the device. For weights that are not of its tensors' shapes, foreach_lerp
    has no kernel for many tensors at once.
    """
    torch._foreach_lerp_(averages, weights, [share] * len(weights))


def move_in_chunks(averages: list[Tensor], weights: list[Tensor], share: Tensor) -> None:
    """The same up to rounding, in three calls per CHUNK of elements, each for many tensors.

    Fewer launches on a GPU; on a CPU, where a kernel costs no launch, its passes take longer.
    """
    for some, targets in chunks(averages, weights):
        change = torch._foreach_sub(targets, some)
        torch._foreach_mul_(change, share)
        torch._foreach_add_(some, change)


def chunks(
    averages: Sequence[Tensor], weights: Sequence[Tensor]
) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Consecutive pairs of at most CHUNK elements, or a single larger one."""
    first = size = 0
    for number, average in enumerate(averages):
        if number > first and size + average.numel() > CHUNK:
            yield list(averages[first:number]), list(weights[first:number])
            first, size = number, 0
        size += average.numel()
    if averages:
        yield list(averages[first:]), list(weights[first:])


def local(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """This rank's local shards: averaging needs no communication."""
    return [
        t.to_local().detach() if isinstance(t, DTensor) else t.detach() for t in tensors.values()
    ]
