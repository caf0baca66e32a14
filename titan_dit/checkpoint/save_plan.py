"""DCP's planning as functions: which shards each rank writes, and the checkpoint's metadata.

A rank plans its own shards. The global plan is made from the plans of all ranks: it chooses one
writer for a shard that several ranks hold, and lists all shards in the metadata. It depends only on
names, shapes and layout, not on values.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.planner import SavePlan

from titan_dit.checkpoint import contents
from titan_dit.checkpoint.staging import TensorTree
from titan_dit.checkpoint.torch_files import METADATA

Choice: TypeAlias = list[tuple[int, int]]
"""The items that a rank writes: (position in its local plan, number of the chunk in its tensor)."""

Described: TypeAlias = dict[str, bytes]
"""Name -> contents of the metadata files, `.metadata` and tensors.json."""


@dataclass(frozen=True)
class LocalPlan:
    """The shards that one rank holds."""

    planner: DefaultSavePlanner
    """Maps the items of `plan` to tensors."""
    plan: SavePlan
    digest: bytes
    """SHA-256 of names, shapes, offsets and dtypes: all that a global plan depends on."""

    def chosen(self, choice: Choice) -> SavePlan:
        """The part of the plan that this rank writes."""
        items = [self.plan.items[position] for position, _ in choice]
        numbered = [
            replace(item, index=replace(item.index, index=chunk))
            for item, (_, chunk) in zip(items, choice, strict=True)
        ]
        return replace(self.plan, items=numbered)


def plan_locally(tensors: TensorTree, is_first: bool) -> LocalPlan:
    """Plan this rank's shards."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(tensors), is_coordinator=is_first)
    plan = planner.create_local_plan()
    return LocalPlan(planner, plan, digest_of(plan))


def digest_of(value: Any) -> bytes:
    """SHA-256 of plain nested dataclasses, by their repr: a new field changes it, too."""
    return hashlib.sha256(repr(value).encode()).digest()


def digest_of_all(digests: Iterable[bytes]) -> bytes:
    """SHA-256 of all ranks' digests, in rank order."""
    return hashlib.sha256(b"".join(digests)).digest()


class GlobalPlan:
    """The global plan of a save. Messages are pickled, between ranks of the same run only."""

    def __init__(self) -> None:
        self.metadata: Any = None

    def choose(self, plans: Sequence[bytes]) -> list[bytes]:
        """The choice of each rank, given the local plans. Raises ValueError if shards overlap."""
        local: list[SavePlan] = [pickle.loads(plan) for plan in plans]
        chosen, self.metadata = DefaultSavePlanner().create_global_plan(local)
        return [pickle.dumps(choice(*pair)) for pair in zip(local, chosen, strict=True)]

    def describe(self, results: Sequence[bytes]) -> Described:
        """`.metadata` and tensors.json, given where each rank wrote its items."""
        places = {
            result.index: result.storage_data for part in results for result in pickle.loads(part)
        }
        # No storage_meta: it holds the folder's path and a random number, which nothing reads.
        whole = replace(self.metadata, storage_data=places, version=CURRENT_DCP_VERSION)
        own = contents.as_json(self.metadata, places)
        return {METADATA: pickle.dumps(whole), contents.NAME: own}


def choice(local: SavePlan, chosen: SavePlan) -> Choice:
    """The items of a local plan that the global plan has chosen."""
    positions = {item.index: position for position, item in enumerate(local.items)}
    return [(positions[item.index], item.index.index or 0) for item in chosen.items]
