"""Collective actions of the ranks that write or read a checkpoint; errors reach every rank."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from titan_dit.config.section import UserError
from titan_dit.launcher import groups

T = TypeVar("T")

PATIENCE = timedelta(hours=3)
"""Timeout of the process group: a fast rank waits this long for the slowest writer."""


class Failed(RuntimeError):
    """A rank's failure as text, raised on every rank."""


class Ranks:
    """All ranks, on the default process group or `group`; a single rank if torch has no group."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.count = dist.get_world_size() if dist.is_initialized() else 1

    @classmethod
    def with_own_group(cls) -> Ranks:
        """Create with a dedicated gloo group: threads must not share one. Collective."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls()
        with groups.opening("the group for checkpoints"):
            group = dist.new_group(None, PATIENCE, "gloo", group_desc=groups.CHECKPOINTS)
        return cls(group)

    @property
    def is_first(self) -> bool:
        """True on rank 0, which acts for all ranks."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """All-gather small picklable objects: every rank's `value`, on every rank."""
        values = [value] * self.count
        if self.count > 1:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Gather bytes (not empty) on rank 0, without unpickling them; [] on the others."""
        if self.count == 1:
            return [data]
        sizes = self.gather(len(data))
        largest = max(sizes)
        parts = [torch.empty(largest, dtype=torch.uint8) for _ in sizes] if self.is_first else None
        dist.gather(padded(data, largest), parts, group=self.group)
        pairs = zip(parts or [], sizes, strict=False)
        return [part[:size].numpy().tobytes() for part, size in pairs]

    def scatter_bytes(self, parts: list[bytes]) -> bytes:
        """Return rank 0's `parts[rank]`; the others pass []."""
        if self.count == 1:
            return parts[0]
        found: list[Any] = [[len(part) for part in parts]]
        dist.broadcast_object_list(found, src=0, group=self.group)
        [sizes] = found
        largest = max(sizes)
        mine = torch.empty(largest, dtype=torch.uint8)
        dist.scatter(mine, [padded(part, largest) for part in parts] or None, group=self.group)
        return mine[: sizes[self.rank]].numpy().tobytes()

    def run_on_all(self, action: Callable[[], T]) -> list[T]:
        """Run `action` on every rank and all-gather the results.

        If any rank raises, Failed is raised on every rank with the lowest failed rank's message.
        """
        result, failure = None, None
        try:
            result = action()
        except Exception as error:
            failure = self.describe(error)
        outcomes: list[tuple[Any, str | None]] = self.gather((result, failure))
        for _, failed in outcomes:
            if failed is not None:
                raise Failed(failed)
        return [value for value, _ in outcomes]

    def run_on_first(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0; broadcast its result or UserError to every rank."""

        def attempt() -> tuple[T | None, str | None]:
            if not self.is_first:
                return None, None
            try:
                return action(), None
            except UserError as error:
                return None, str(error)

        outcome: list[Any] = [attempt()]
        if self.count > 1:  # A gather would need memory for as many results as there are ranks.
            dist.broadcast_object_list(outcome, src=0, group=self.group)
        result, failure = outcome[0]
        if failure is not None:
            raise UserError(failure)
        found: T = result
        return found

    def describe(self, error: BaseException) -> str:
        """An error as one line, prefixed with the rank if there are several."""
        if isinstance(error, Failed):
            return str(error)
        text = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, OSError) and error.strerror:
            text = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
        elif not isinstance(error, OSError | RuntimeError | UserError):
            text = f"{type(error).__name__}: {text}"
        return f"rank {self.rank}: {text}" if self.count > 1 else text


def padded(data: bytes, size: int) -> Tensor:
    """Bytes as a tensor of `size` elements: gather and scatter take equal ones."""
    return torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
