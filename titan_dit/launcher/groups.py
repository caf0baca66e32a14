"""Process groups of this rank: lazy sockets, failures to open, timeouts.

torch has no public list of the groups and, before 2.15, no public way to change a timeout: its
private parts are in this file only.
"""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from titan_dit.launcher import host_names
from titan_dit.launcher.failure import NetworkFailure
from titan_dit.system.launched_as import LaunchedAs

STARTING_S = 3600.0
"""Timeout of every group before the watchdog runs: one rank may list a dataset for all others."""
CHECKPOINTS = "checkpoints"
"""Description of the group of the thread that saves; it keeps its own timeout."""


def connect_lazily() -> None:
    """Have gloo connect two ranks when they first talk, instead of all ranks with all at once.

    Otherwise each rank holds a socket per group and other rank. Call before init_process_group.
    """
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")


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


def find_store(host: str) -> None:
    """Wait for the name of rank 0's host, and choose the network interface of gloo.

    torch would try an unknown name in silence until the timeout, an hour.
    """
    if not host_names.wait_for(host):
        here = socket.gethostname()
        raise RuntimeError(
            f"MASTER_ADDR={host}: this host, {here}, does not know the name. {host_names.FIX}"
        )
    host_names.choose_interface(host)


def cause_of(error: Exception) -> str:
    """The first line of torch's message, and NCCL's own words, which are among its last ones."""
    message = str(error).partition("Exception raised from")[0]
    torchs, _, nccls = message.partition("Last error:")
    texts = torchs.strip() or type(error).__name__, nccls.strip()
    return ": ".join(text.splitlines()[0].rstrip(" .:") for text in texts if text)


def opened() -> list[dist.ProcessGroup]:
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
    for group in opened():
        if group.group_desc != CHECKPOINTS:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # A dry run's groups have no timeout.
                set_timeout(timeout, group)
