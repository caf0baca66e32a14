"""Ring and all-to-all communication of one process group.

It uses functional collectives, which are asynchronous and can be traced by torch.compile. Only this
file calls these private operators (torch.ops._c10d_functional), which take the group's name in
torch 2.11 to 2.15.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # registers the operators for torch.compile
from torch import Tensor
from torch.autograd.function import FunctionCtx


class Peers(Protocol):
    """The communication that context parallelism needs. Messages have the batch in dim 1."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def rank(self) -> int:
        """This rank's position in the ring."""

    def send(self, message: Tensor) -> Tensor:
        """Start sending to the next rank; returns the previous rank's message for `arrive`.

        The message must not be modified before `arrive`.
        """

    def arrive(self, incoming: Tensor) -> Tensor:
        """Wait for the message that `send` returned. On a GPU the stream waits, not the host."""

    def all_to_all(self, parts: Tensor) -> Tensor:
        """Send parts[i] to rank i; rank j's part becomes [j] of the result. Differentiable."""


@dataclass(frozen=True)
class Exchange:
    """`Peers` of a process group."""

    group: str
    """The group's name, which unlike the group can be copied and compiled."""
    rank: int
    size: int

    @classmethod
    def over(cls, group: dist.ProcessGroup) -> Exchange:
        """The ranks of `group`."""
        return cls(str(group.group_name), dist.get_rank(group), group.size())

    def send(self, message: Tensor) -> Tensor:
        """See `Peers.send`. An all-to-all with data for the next rank only.

        Every backend then posts sends and receives together.
        """
        to, of = [0] * self.size, [0] * self.size
        to[(self.rank + 1) % self.size] = of[(self.rank - 1) % self.size] = message.shape[0]
        return _start(message.contiguous(), of, to, self.group)

    def arrive(self, incoming: Tensor) -> Tensor:
        """See `Peers.arrive`."""
        return _wait(incoming)

    def all_to_all(self, parts: Tensor) -> Tensor:
        """Send parts[i] to rank i; differentiable."""
        result: Tensor = _AllToAll.apply(parts, self.size, self.group)  # type: ignore[no-untyped-call]
        return result


class _AllToAll(torch.autograd.Function):
    """Part j of rank i becomes part i of rank j: its own inverse and its own transpose."""

    @staticmethod
    def forward(ctx: FunctionCtx, parts: Tensor, size: int, group: str) -> Tensor:
        ctx.size, ctx.group = size, group  # type: ignore[attr-defined]
        return _wait(_start(parts.contiguous(), [1] * size, [1] * size, group))

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        size, group = ctx.size, ctx.group  # type: ignore[attr-defined]
        return _wait(_start(grad.contiguous(), [1] * size, [1] * size, group)), None, None


def _start(x: Tensor, receive: list[int], send: list[int], group: str) -> Tensor:
    result: Tensor = torch.ops._c10d_functional.all_to_all_single(x, receive, send, group)
    return result


def _wait(x: Tensor) -> Tensor:
    result: Tensor = torch.ops._c10d_functional.wait_tensor(x)
    return result
