"""The plan of a run's saves: made by the first one, then reused as long as it fits.

Every rank sends the digest of what it holds to all ranks. They compare the same digests, so they
agree whether the plan still fits; a save with an old plan is impossible. A plan lives as long as
its process: a resumed run, on any number of ranks, makes its own.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from torch.distributed.checkpoint.planner import SavePlan

from titan_dit.checkpoint.planning_process import PlanningProcess
from titan_dit.checkpoint.save_plan import (
    Choice,
    Described,
    GlobalPlan,
    LocalPlan,
    digest_of,
    digest_of_all,
    plan_locally,
)
from titan_dit.checkpoint.staging import TensorTree
from titan_dit.launcher.ranks import Ranks

LARGE_BYTES = 4 << 20
"""Minimum bytes of all ranks' pickled local plans for which a process is started: about 20,000
shards, 2 s of Python."""

Digests: TypeAlias = tuple[bytes, bytes | None]
"""(digest of this rank's part now, digest of all ranks' parts at the last save)."""


class Plans:
    """A rank's part of the plan, the metadata on rank 0, and the digests they were made for."""

    def __init__(self) -> None:
        self.planned_for: bytes | None = None
        """Digest of all local plans."""
        self.choice: Choice = []
        self.planner: GlobalPlan | PlanningProcess | None = None
        """Set on rank 0 between `choose` and `finish`."""
        self.is_planning = False
        """True while rank 0 has a planner."""
        self.described_for: bytes | None = None
        """Digest of where all ranks have written their shards."""
        self.metadata: Described = {}

    def plan(self, tensors: TensorTree, ranks: Ranks) -> tuple[LocalPlan, SavePlan]:
        """This rank's local plan, and the part of it that this rank writes. Collective."""
        mine: list[LocalPlan] = []

        def offer() -> Digests:
            mine.append(plan_locally(tensors, ranks.is_first))
            return mine[0].digest, self.planned_for

        offers = ranks.run_on_all(offer)
        if not agree(offers):
            self.make(mine[0], ranks)
        self.planned_for = whole(offers)
        return mine[0], mine[0].chosen(self.choice)

    def make(self, local: LocalPlan, ranks: Ranks) -> None:
        """Plan anew. Collective."""
        self.planned_for = self.described_for = None
        self.is_planning = False
        plans = ranks.gather_bytes(pickle.dumps(local.plan))
        choices: list[bytes] = []
        # The choices are not returned: every rank would receive all of them.
        ranks.run_on_all(lambda: choices.extend(self.choose(plans)) if plans else None)
        self.choice = pickle.loads(ranks.scatter_bytes(choices))
        self.is_planning = True

    def choose(self, plans: Sequence[bytes]) -> list[bytes]:
        """Plan on rank 0."""
        self.close()
        self.planner = GlobalPlan()
        if sum(map(len, plans)) > LARGE_BYTES:
            with suppress(OSError):  # Without a process the plan is made here.
                self.planner = PlanningProcess()
        return self.planner.choose(plans)

    def describe(
        self, local: LocalPlan, results: Any, digests: Sequence[Digests], ranks: Ranks
    ) -> Described:
        """`GlobalPlan.describe` on rank 0. Collective. `digests`: of all ranks' `results`."""
        if not agree(digests):
            if not self.is_planning:  # The same shards, at other offsets in their files.
                planned_for = self.planned_for
                self.make(local, ranks)
                self.planned_for = planned_for
            self.described_for, self.is_planning = None, False
            places = ranks.gather_bytes(pickle.dumps(results))
            ranks.run_on_all(lambda: self.finish(places) if places else None)
            self.described_for = whole(digests)
        return self.metadata

    def finish(self, places: Sequence[bytes]) -> None:
        """Make the metadata on rank 0, which ends the planning."""
        assert self.planner
        self.metadata = self.planner.describe(places)
        self.planner = None

    def digests(self, results: Any) -> Digests:
        """This rank's digests for `describe`; `results`: where its items were written."""
        return digest_of(results), self.described_for

    def close(self) -> None:
        """End the planning process, if there is one."""
        if isinstance(self.planner, PlanningProcess):
            self.planner.close()
        self.planner = None

    def forget(self) -> None:
        """Plan anew at the next save. Call on all ranks."""
        self.close()
        self.planned_for = self.described_for = None
        self.is_planning = False


def whole(offers: Sequence[Digests]) -> bytes:
    """Digest of what all ranks hold now."""
    return digest_of_all(now for now, _ in offers)


def agree(offers: Sequence[Digests]) -> bool:
    """Return True if all ranks' parts are those of every rank's last save."""
    return {before for _, before in offers} == {whole(offers)}
