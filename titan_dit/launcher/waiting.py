"""Says what a launcher waits for while it has no ranks: torch's rendezvous waits in silence."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from titan_dit.launcher import host_names

NOTICE_S = 20.0
"""A launcher that waits longer says so once."""


def endpoint_of(arguments: Sequence[str]) -> str | None:
    """The rendezvous' host:port among torchrun's arguments, if there are several nodes."""
    return option(arguments, "--rdzv-endpoint")


def most_nodes(arguments: Sequence[str]) -> int:
    """The largest number of nodes among torchrun's arguments; torchrun refuses what is none."""
    most = (option(arguments, "--nnodes") or "1").rpartition(":")[2]
    return int(most) if most.isdecimal() else 1


def option(arguments: Sequence[str], name: str) -> str | None:
    """The value of an option of torchrun."""
    return arguments[arguments.index(name) + 1] if name in arguments[:-1] else None


def notice(endpoint: str) -> str:
    """What is known of the endpoint, as one line."""
    return f"still waiting for RDZV_ENDPOINT={endpoint}: {state_of(endpoint)}"


def state_of(endpoint: str) -> str:
    """Whether the endpoint can be reached, and what to do."""
    host = endpoint
    try:
        host, port = host_names.split(endpoint)
        # As torchrun: this host need not know its own name.
        reached = host_names.LOOPBACK if host_names.is_this_host(host) else host
        with socket.create_connection((reached, port), timeout=5):
            return (
                "it accepts connections, so either fewer nodes than NNODES have joined, or another "
                "program listens there: take another port"
            )
    except socket.gaierror:
        return f"this machine does not know the host {host}"
    except (OSError, ValueError) as error:
        return f"it cannot be reached ({error}): its launcher must run and its port be open"
