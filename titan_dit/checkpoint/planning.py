"""The plan of a save: which shards each rank writes, and the checkpoint's metadata.

DCP's own planning, as functions. With a thousand ranks it is a minute of Python, so the first
save makes it in a process of its own, and later saves use it again as long as it fits.
"""

from __future__ import annotations

import gc
import hashlib
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.planner import SavePlan

from titan_dit.checkpoint import torch_files
from titan_dit.checkpoint.staging import TensorTree
from titan_dit.checkpoint.torch_files import METADATA
from titan_dit.ranks.process_group import Ranks

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
        own = torch_files.contents_json(self.metadata, places)
        return {METADATA: pickle.dumps(whole), torch_files.CONTENTS: own}


def choice(local: SavePlan, chosen: SavePlan) -> Choice:
    """The items of a local plan that the global plan has chosen."""
    positions = {item.index: position for position, item in enumerate(local.items)}
    return [(positions[item.index], item.index.index or 0) for item in chosen.items]


READY = "ready"
START_S = 120.0
"""Maximum seconds of its start: imports from a slow disk. After that the rank plans itself."""
ROOT = Path(__file__).resolve().parents[2]


class PlanningProcess:
    """A `GlobalPlan` in another process. Raises OSError if it cannot be started."""

    def __init__(self) -> None:
        # A file: a full pipe that nobody reads would block the process.
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C must not end it: the ranks save a last checkpoint.
        )
        if not self.is_ready():
            raise OSError(f"the planning process does not start: {self.end()}")

    def choose(self, plans: Sequence[bytes]) -> list[bytes]:
        """Return the chosen plans, see `GlobalPlan.choose`."""
        choices: list[bytes] = self.ask("choose", plans)
        return choices

    def describe(self, results: Sequence[bytes]) -> dict[str, bytes]:
        """Return the files of metadata, see `GlobalPlan.describe`; end the process."""
        described: dict[str, bytes] = self.ask("describe", results)
        self.close()
        return described

    def ask(self, name: str, parts: Sequence[bytes]) -> Any:
        """Call a method of the process's `GlobalPlan`.

        Raises RuntimeError if the process has ended, or the method fails.
        """
        assert self.process.stdin
        try:
            pickle.dump((name, list(parts)), self.process.stdin)
            self.process.stdin.flush()
            failure, answer = self.answer()
        except (EOFError, BrokenPipeError):
            raise RuntimeError(f"the process that plans a checkpoint ended: {self.end()}") from None
        if failure:
            raise RuntimeError(f"the checkpoint cannot be planned: {failure}")
        return answer

    def is_ready(self) -> bool:
        """Wait for the process's first message, up to START_S."""
        assert self.process.stdout
        if not select.select([self.process.stdout], [], [], START_S)[0]:
            return False
        try:
            return bool(self.answer() == READY)
        except Exception:  # Other output on stdout is no pickle; loading it can raise anything.
            return False

    def answer(self) -> Any:
        """The next object that the process sends. Raises EOFError if the process has ended."""
        assert self.process.stdout
        try:
            return pickle.load(self.process.stdout)
        except (EOFError, pickle.UnpicklingError):
            raise EOFError from None

    def end(self) -> str:
        """End the process; return its exit code and the last line of its stderr."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=1)  # Its own exit code.
        self.close()
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        return f"exit code {self.process.returncode}. {lines[-1] if lines else ''}".strip()

    def close(self) -> None:
        """End the process.

        A data worker may have inherited the pipes: closing them here does not close them there.
        """
        assert self.process.stdin
        assert self.process.stdout
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(BrokenPipeError):
                pipe.close()
        self.process.kill()
        self.process.wait()


def main() -> None:
    """Answer calls from stdin on stdout until stdin ends: the rank closed it, or died."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        signal.signal(signal.Signals[name], signal.SIG_IGN)
    os.nice(5)  # The ranks come first.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # A library's prints must not mix with the answers.

    gc.disable()  # Millions of small objects, none in a cycle.
    plan = GlobalPlan()
    reply: Any = READY
    while True:
        pickle.dump(reply, answers)
        answers.flush()
        try:
            name, parts = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            reply = None, getattr(plan, name)(parts)
        except Exception as error:
            reply = f"{type(error).__name__}: {error}", None


if __name__ == "__main__":
    main()


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
        """Have rank 0 plan anew, and receive this rank's choice. Collective."""
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
    """True if all ranks' parts are unchanged since every rank's last save."""
    return {before for _, before in offers} == {whole(offers)}
