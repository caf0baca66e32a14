"""What the ranks of a tp x cp group run next: the first one decides and tells the others.

They take part in each other's collectives, so they must run the same actions in the same sequence,
although messages may arrive in another one on each. Decisions are CPU messages, also in a run on
GPUs: no device waits for them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from titan_dit.launcher import groups
from titan_dit.parallel.links import named, opened
from titan_dit.schedules.action import Action, Kind

KINDS = tuple(Kind)


class Decisions:
    """The decisions of a group of ranks; the first one has them, the others receive them."""

    def __init__(self, ranks: Sequence[int]) -> None:
        """`ranks`: in the world. Collective over them."""
        self.ranks = ranks
        self.leads = dist.get_rank() == ranks[0]
        self.group = open_group(ranks) if len(ranks) > 1 else None
        self.sending: list[tuple[Tensor, dist.Work]] = []
        """Decisions must live until they are sent; gloo never reports that."""

    def tell(self, action: Action) -> None:
        """Tell the other ranks what this one runs next."""
        for rank in self.ranks[1:]:
            decision = torch.tensor([KINDS.index(action.kind), action.stage, action.microbatch])
            work = dist.isend(decision, rank, self.group)
            assert work is not None
            self.sending.append((decision, work))

    def told(self) -> Action:
        """Wait for the next action; on the other ranks."""
        decision = torch.empty(3, dtype=torch.int64)
        dist.recv(decision, self.ranks[0], self.group)
        kind, stage, microbatch = decision.tolist()
        return Action(KINDS[kind], stage, microbatch)

    def flush(self) -> None:
        """Wait until the decisions of a pass have left."""
        for _, work in self.sending:
            work.wait()
        self.sending.clear()


def open_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """The CPU group of the ranks, which open it alone."""
    name = f"decisions of ranks {','.join(map(str, ranks))}"
    if group := opened(name):  # Of an earlier build in this process.
        return group
    with groups.opening(f"the group of {name}"), named(name):
        group = dist.new_group(
            list(ranks), backend="gloo", use_local_synchronization=True, group_desc=name
        )
    return group
