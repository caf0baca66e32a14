"""Run-time order in a tp x cp group: the first rank decides and sends its choices to the others.

The ranks share collectives, so they must run the same actions in the same order, although messages
may arrive in a different order on each. Decisions travel over sockets of the hosts, also in a run
on GPUs: no device waits for them.
"""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Sequence

import torch.distributed as dist

from titan_dit.launcher import groups
from titan_dit.parallel.links import named, opened
from titan_dit.parallel.transports.meeting import Peer, meet
from titan_dit.schedules.action import Action, Kind


class Decisions:
    """The decisions of a group of ranks: the first rank sends them, the others receive them."""

    def __init__(self, ranks: Sequence[int]) -> None:
        """`ranks`: global ranks of the group. Collective over them."""
        own = list(ranks).index(dist.get_rank())
        self.leads = own == 0
        self.peers: list[Peer] = []
        """Connections: on the first rank to all others, on the others to the first."""
        if len(ranks) > 1:
            wanted = range(1, len(ranks)) if self.leads else [0]
            self.peers = [*meet(open_group(ranks), wanted).values()]
        self.received: deque[Action] = deque()

    def tell(self, action: Action) -> None:
        """Send this rank's next action to the other ranks; never blocks."""
        for peer in self.peers:
            peer.tell(action.stage, action.microbatch, action.kind.encode())

    def read(self) -> None:
        """Read the decisions that have arrived; never blocks.

        Raises:
            NetworkFailure: a rank of the group has ended.
        """
        for peer in self.peers:
            for stage, microbatch, kind, _ in peer.exchange():
                self.received.append(Action(Kind(kind.decode()), stage, microbatch))

    def told(self) -> Action | None:
        """The next received action; None if none has been read yet."""
        return self.received.popleft() if self.received else None

    def flush(self) -> None:
        """Wait until all decisions have left; at the end of a pass, before any collective."""
        for peer in self.peers:
            while peer.has_backlog:
                waiting = select.poll()
                waiting.register(peer.socket, select.POLLOUT)
                waiting.poll()
                peer.write()

    def close(self) -> None:
        """Close the sockets."""
        for peer in self.peers:
            peer.close()


def open_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """The gloo group over which the ranks connect; only they open it."""
    name = f"decisions of ranks {','.join(map(str, ranks))}"
    if group := opened(name):  # By an earlier build in this process.
        return group
    with groups.opening(f"the group of the {name}"), named(name):
        found: dist.ProcessGroup = dist.new_group(
            list(ranks), backend="gloo", use_local_synchronization=True, group_desc=name
        )
    return found
