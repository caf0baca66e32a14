"""Tied weights of a pipeline: the first stage owns them, the last stage computes with a copy.

Before a pass the owner sends its shards to the copies, and after it the copies' gradients come
back, to be added to the owner's; those of a frozen weight are not computed. Only the owner has an
optimizer state, an average, a place in the gradient norm and in checkpoints: the copies cannot
drift. Both messages are sent while the other end is idle: the last stage waits for its first
microbatch, the first stage for its last gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_dit.models.base import Model
from titan_dit.parallel.p2p_groups import P2PGroups
from titan_dit.ranks.shards import local


class TiedWeights:
    """The weights of this rank that are tied over stages: owners, copies, or both, or none.

    Without a pipeline there is one stage, whose parts share their parameters (`Model.tie`).
    """

    def __init__(
        self,
        parts: Mapping[int, Model],
        stage_ranks: Sequence[int],
        p2p: P2PGroups,
        dtype: torch.dtype,
    ) -> None:
        """`dtype`: compute dtype of the stages."""
        self.dtype = dtype
        self.p2p, self.owner, self.holder = p2p, stage_ranks[0], stage_ranks[-1]
        last = len(stage_ranks) - 1
        self.owners: list[nn.Parameter] = []
        self.copies: list[nn.Parameter] = []
        if last and 0 in parts:
            self.owners = [parts[0].get_parameter(name) for name in parts[0].tied.values()]
        if last and last in parts:
            self.copies = list(copies_of(parts[last]).values())
        self.sending: tuple[Sequence[Tensor], Sequence[dist.Work]] = (), ()
        """The last message, whose tensors must live until it is sent."""

    @torch.no_grad()
    def fetch(self) -> None:
        """Copy the owners' weights to the copies. Call it before parameters are all-gathered."""
        # In the compute dtype, to which FSDP rounds them anyway: half of the bytes in bf16.
        weights = [local(weight).to(self.dtype) for weight in self.owners]
        copies = [local(copy) for copy in self.copies]
        received = self.sent(weights, copies, self.owner, self.holder, self.dtype)
        for copy, weight in zip(copies, received, strict=True):
            copy.copy_(weight)

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Add the copies' gradients to the owners'. Call it after all gradients are reduced."""
        theirs = [taken(copy) for copy in self.copies if copy.requires_grad]
        learning = [weight for weight in self.owners if weight.requires_grad]
        like = [local(weight) for weight in learning]
        received = self.sent(theirs, like, self.holder, self.owner)
        for weight, more in zip(learning, received, strict=True):
            assert weight.grad is not None
            local(weight.grad).add_(more)

    def sent(
        self,
        tensors: Sequence[Tensor],
        like: Sequence[Tensor],
        source: int,
        target: int,
        dtype: torch.dtype | None = None,
    ) -> Sequence[Tensor]:
        """Send `tensors` from `source` to `target`; return the received ones, () on other ranks.

        `like`: tensors of the shapes that arrive. The source does not wait: its tensors may change
        after the next call.
        """
        if source == target:
            return tensors
        for work in self.sending[1]:
            work.wait()
        self.sending = (), ()  # gloo hangs if it is waited for twice.
        if tensors:
            whole = [tensor.contiguous() for tensor in tensors]
            self.sending = whole, self.p2p.send(whole, target)
        if not like:
            return ()
        buffers = [torch.empty_like(tensor, dtype=dtype) for tensor in like]
        for work in self.p2p.receive(buffers, source):
            work.wait()
        return buffers


def copies_of(part: Model) -> dict[str, nn.Parameter]:
    """The copies on a stage without the owners, by the owners' names."""
    if part.embed is not None or part.head is None:
        return {}
    return {name: part.get_parameter(copy) for copy, name in part.tied.items()}


def taken(copy: nn.Parameter) -> Tensor:
    """The gradient of a copy, which then has none."""
    gradient = copy.grad
    copy.grad = None
    return torch.zeros_like(local(copy)) if gradient is None else local(gradient)
