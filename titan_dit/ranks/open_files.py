"""The limit of open files (RLIMIT_NOFILE), which sockets count against."""

from __future__ import annotations

import math
import os
import resource
from contextlib import suppress

from titan_dit.config.section import UserError

OTHERS = {"cpu": 96, "cuda": 512}
"""Files that do not grow with the number of ranks: 32 shards of two datasets, Python, the groups'
neighbours, CUDA."""
ENOUGH = 1 << 20
"""Never raise the limit above it: some programs close every possible file when they start."""


def raise_limit(at_least: int, what: str) -> None:
    """Raise the soft limit to the hard one; raise UserError if `what` needs more than that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < highest:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < at_least:
        raise UserError(
            f"{what} needs up to {at_least:,} open files, but the limit is {soft:,}. Raise the "
            "hard limit: ulimit -Hn as root, LimitNOFILE= of a systemd service (slurmd), "
            f"docker run --ulimit nofile={ENOUGH}."
        )


def needed_by_launcher(num_nodes: int) -> int:
    """Files of a launcher at most: that on RDZV_ENDPOINT's host has a socket to every node."""
    return OTHERS["cpu"] + num_nodes


def needed(rank: int, num_ranks: int, device_type: str) -> int:
    """Files that a rank opens at most, by benchmarks/scale.py.

    Sockets to a few neighbours per group; rank 0 also has one to every rank for checkpoints, and
    one for the store that the ranks meet in, unless the launcher holds it.
    """
    if rank:
        return OTHERS[device_type] + 2 * math.ceil(math.log2(num_ranks))
    holds_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return OTHERS[device_type] + num_ranks * (1 + holds_store)
