"""The process groups of this rank: start, timeouts, and what all ranks do together.

`start` opens the default group and gives the `World`. `Ranks` gathers values, and runs an action
on rank 0 or on all ranks; a failure on all, or a UserError on rank 0, is raised on every rank.

torch has no public list of the groups and, before 2.15, no public way to change a timeout: its
private parts are in this file only.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from titan_dit.config.section import UserError
from titan_dit.ranks import disk_errors, hosts, open_files
from titan_dit.ranks.failure import Disruption, NetworkFailure
from titan_dit.system import stdio
from titan_dit.system.launched_as import LaunchedAs

STARTING = timedelta(hours=1)
"""Timeout of every group before the watchdog runs: one rank may list a dataset for all others."""
CHECKPOINTS = "checkpoints"
"""Description of the group of the thread that saves; it keeps its own timeout."""
PATIENCE = timedelta(hours=3)
"""Timeout of that group: a fast rank waits this long for the slowest writer."""
CLOSING_S = 60.0
"""Limit for closing the groups of a job that is done: no watchdog runs any more."""

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This rank, the world size and the device."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """True on rank 0, which prints, draws and commits."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """All-gather of a small object, in rank order."""
        return Ranks().gather(value)


def started_ranks() -> int:
    """World size set by torchrun; 1 without it."""
    return LaunchedAs.here().world_size


@contextmanager
def start(device_type: str | None = None) -> Iterator[World]:
    """Initialise the process group; one rank without torchrun's environment."""
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(device_type)
    if device_type == "cuda":
        local, visible = LaunchedAs.here().local_rank, torch.cuda.device_count()
        if local >= visible:
            raise UserError(f"NGPU: local rank {local} has no GPU. Set NGPU = {visible}.")
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    # gloo for CPU tensors: checkpoints and small objects.
    backend = "cuda:nccl,cpu:gloo" if device_type == "cuda" else "gloo"
    connect_lazily()
    use_one_gloo_thread()
    here = LaunchedAs.here()
    if here.is_rank:
        rank, size = here.rank, here.world_size
        need = open_files.needed(rank, size, device_type)
        open_files.raise_limit(need, f"rank {rank} of {size:,}")
        with opening("the default process group"):
            wait_for_address(here.address)
            dist.init_process_group(backend, timeout=STARTING)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield World(dist.get_rank(), dist.get_world_size(), device)
    # Not in a `finally`: after an error it would deadlock with ranks that wait for this one.
    close_groups()


def close_groups() -> None:
    """Close the process groups; leave it after CLOSING_S, as the job is done and the process ends.

    A communicator whose peer or network is gone may block for ever.
    """
    raised: list[Exception] = []

    def close() -> None:
        try:
            dist.destroy_process_group()
        except Exception as error:
            raised.append(error)

    closing = threading.Thread(target=close, daemon=True)
    closing.start()
    closing.join(CLOSING_S)
    if raised:
        raise raised[0]
    if closing.is_alive():
        stdio.write(sys.stderr, f"the process groups did not close within {CLOSING_S:g} s\n")


def set_deterministic() -> None:
    """Use deterministic kernels only; an operation without one raises."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


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
        with opening("the group for checkpoints"):
            group = dist.new_group(None, PATIENCE, "gloo", group_desc=CHECKPOINTS)
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
        """Run `action` on rank 0; broadcast its result.

        Its UserError is raised on every rank. So is its file error, as a Disruption on the others.
        """
        raised: Exception | None = None

        def attempt() -> tuple[T | None, Exception | None]:
            nonlocal raised
            if not self.is_first:
                return None, None
            try:
                return action(), None
            except UserError as error:
                raised = error
                kind = Disruption if isinstance(error, Disruption) else UserError
                return None, kind(str(error))
            except OSError as error:
                raised = error
                if error.filename is None:  # Not of a file: a traceback, as on the first rank.
                    return None, Failed(self.describe(error))
                return None, Disruption(disk_errors.line_of(error))

        outcome: list[Any] = [attempt()]
        if self.count > 1:  # A gather would need memory for as many results as there are ranks.
            dist.broadcast_object_list(outcome, src=0, group=self.group)
        result, failure = outcome[0]
        if failure is not None:
            raise raised or failure
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


def connect_lazily() -> None:
    """Have gloo connect two ranks when they first talk, instead of all ranks with all at once.

    Otherwise each rank holds a socket per group and other rank. Call before init_process_group.
    """
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")


def use_one_gloo_thread() -> None:
    """Have one thread run the collectives of a gloo group. Call before init_process_group.

    torch has two of them for each network interface. When both have ended a collective, both write
    its name into the same string, without a lock (`ProcessGroupGloo::runLoop`, in 2.11 to 2.15). A
    name of more than 15 characters, as DTensor's collectives have, is then freed twice now and
    then, and the rank dies of a segmentation fault.
    """
    gloo: Any = dist.ProcessGroupGloo
    if hasattr(gloo.__init__, "__wrapped__"):
        return

    @wraps(gloo.__init__)
    def init(
        group: Any,
        store: Any,
        rank: int,
        size: int,
        *given: Any,
        timeout: timedelta = STARTING,
        **more: Any,
    ) -> None:
        if given or "options" in more:  # Somebody's own options.
            init.__wrapped__(group, store, rank, size, *given, **more)
            return
        options = gloo._Options()
        options._timeout, options._threads = timeout, 1
        # As torch chooses them.
        names = os.environ.get("GLOO_SOCKET_IFNAME")
        options._devices = (
            [gloo.create_device(interface=name) for name in names.split(",")]
            if names
            else [gloo.create_default_device()]
        )
        for name, value in more.items():
            setattr(options, name, value)
        init.__wrapped__(group, store, rank, size, options)

    gloo.__init__ = init


@contextmanager
def opening(what: str) -> Iterator[None]:
    """Report a group that cannot be opened in one line, as NetworkFailure."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (dist.DistError, RuntimeError) as error:
        here = LaunchedAs.here()
        raise NetworkFailure(
            f"rank {here.rank} of {here.world_size} could not open {what}: {cause_of(error)}. All "
            f"nodes must reach {here.address}:{here.port} (rank 0) and each other; "
            "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the network interface."
        ) from error


def wait_for_address(host: str) -> None:
    """Wait for the name of rank 0's host, and choose the network interface of gloo.

    torch would try an unknown name in silence until the timeout, an hour.
    """
    if not hosts.wait_for(host):
        here = socket.gethostname()
        raise RuntimeError(
            f"MASTER_ADDR={host}: this host, {here}, does not know the name. {hosts.FIX}"
        )
    hosts.choose_interface(host)


def cause_of(error: Exception) -> str:
    """The first line of torch's message, and NCCL's own words, which are among its last ones."""
    message = str(error).partition("Exception raised from")[0]
    torchs, _, nccls = message.partition("Last error:")
    texts = torchs.strip() or type(error).__name__, nccls.strip()
    return ": ".join(text.splitlines()[0].rstrip(" .:") for text in texts if text)


def own_groups() -> list[dist.ProcessGroup]:
    """Every process group that this rank belongs to, whoever opened it."""
    return list(distributed_c10d._world.pg_map) if dist.is_initialized() else []


def set_timeouts(seconds: float) -> None:
    """Set the timeout of every open group but the checkpoints'.

    A new group takes torch's default, not that of the default group: 600 s with NCCL, which would
    end a run that the watchdog allows more.
    """
    # Public since torch 2.15.
    set_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
    timeout = timedelta(seconds=seconds)
    for group in own_groups():
        if group.group_desc != CHECKPOINTS:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # A dry run's groups have no timeout.
                set_timeout(timeout, group)
