"""Point-to-point process groups of a pipeline: one for each pair of ranks and direction.

NCCL runs the messages of a group one after another, in the order in which they were posted, and
before torch 2.13 those of all peers in one queue. With a group per peer and direction a message
waits for no message of another peer or of the other direction.

Only this file sets the name of a process group, which is private in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from titan_dit.ranks import process_group


class P2PGroups:
    """The groups of this rank along a mesh axis, opened by their two ends alone."""

    def __init__(self, mesh: DeviceMesh, label: str = "") -> None:
        """`label`: distinguishes groups that have the same ends, such as those of two stages."""
        self.mesh, self.label = mesh, label
        self.rank = mesh.get_local_rank()
        self.groups: dict[tuple[int, int], dist.ProcessGroup] = {}

    def open(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Open the groups of (source, target) that contain this rank; equal pairs on all ranks."""
        # In the same order on all ranks: otherwise two ends would deadlock.
        for source, target in sorted(set(pairs)):
            if self.rank not in (source, target) or (source, target) in self.groups:
                continue
            # A second mesh over all ranks of the world has the same group, and so the same names.
            name = f"{self.mesh.get_group().group_name}:{self.label}{source}->{target}"
            if group := opened(name):
                self.groups[source, target] = group
                continue
            with (
                process_group.opening(f"the group from pipeline rank {source} to {target}"),
                named(name),
            ):
                self.groups[source, target] = self.new_group(source, target)
                self.connect(source, target)

    def new_group(self, source: int, target: int) -> dist.ProcessGroup:
        """Make a group; its two ranks call this."""
        group: dist.ProcessGroup = dist.new_group(
            [self.global_rank(source), self.global_rank(target)],
            # A GPU run's default group has gloo, too, whose sockets would be of no use.
            backend="nccl" if self.mesh.device_type == "cuda" else None,
            use_local_synchronization=True,
            group_desc=f"pipeline rank {source} to {target}",
        )
        return group

    def connect(self, source: int, target: int) -> None:
        """Exchange a first message, which connects the two ends.

        NCCL, and gloo with lazy connections, connect a group at its first message, and the host
        waits for it. A receive that is posted early could then deadlock.
        """
        first = [torch.zeros(1, device=self.mesh.device_type)]
        works = self.send(first, target) if self.rank == source else self.receive(first, source)
        for work in works:
            work.wait()

    def global_rank(self, rank: int) -> int:
        """The rank in the world of a rank on this axis."""
        return dist.get_global_rank(self.mesh.get_group(), rank)

    def send(self, tensors: Sequence[Tensor], target: int) -> list[dist.Work]:
        """Start sending the tensors of one message; they must live until the works are done."""
        return self._post(dist.isend, tensors, (self.rank, target), target)

    def receive(self, tensors: Sequence[Tensor], source: int) -> list[dist.Work]:
        """Start receiving a message, in the order in which `source` sends its messages."""
        return self._post(dist.irecv, tensors, (source, self.rank), source)

    def _post(
        self,
        operation: Callable[..., Any],
        tensors: Sequence[Tensor],
        pair: tuple[int, int],
        peer: int,
    ) -> list[dist.Work]:
        group, peer = self.groups[pair], self.global_rank(peer)
        # One NCCL kernel for all tensors of a message.
        works = dist.batch_isend_irecv([dist.P2POp(operation, t, peer, group) for t in tensors])
        return [work for work in works if work is not None]


def opened(name: str) -> dist.ProcessGroup | None:
    """The open process group of this name; None without one."""
    return next((group for group in process_group.own_groups() if group.group_name == name), None)


@contextmanager
def named(name: str) -> Iterator[None]:
    """Give the process group that is opened within the block this name.

    torch names a group that only some ranks open by the number of groups of a rank, which differs
    between the ranks of a pipeline: the two ends would deadlock.
    """
    private: Any = distributed_c10d
    own = private._process_group_name
    private._process_group_name = lambda *_, **__: name
    try:
        yield
    finally:
        private._process_group_name = own
