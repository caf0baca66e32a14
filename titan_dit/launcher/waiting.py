"""Says what a launcher waits for while it has no ranks: torch's rendezvous waits in silence."""

from __future__ import annotations

import socket
from collections.abc import Sequence

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
    host, _, port = endpoint.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=5):
            state = (
                "it accepts connections, so either fewer nodes than NNODES have joined, or another "
                "program listens there: take another port"
            )
    except socket.gaierror:
        state = f"this machine does not know the host {host}"
    except (OSError, ValueError) as error:
        state = f"it cannot be reached ({error}): its launcher must run and its port be open"
    return f"still waiting for RDZV_ENDPOINT={endpoint}: {state}"
