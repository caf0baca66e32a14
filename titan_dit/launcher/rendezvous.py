"""A rendezvous of launchers: what it waits for, and what they must have in common.

torch's rendezvous waits in silence. Ranks of launchers that differ would wait for each other, or
train with different code, without a word.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import titan_dit
from titan_dit.config.section import UserError
from titan_dit.ranks import hosts

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
    """One line about an endpoint that no rendezvous has completed at."""
    return f"still waiting for RDZV_ENDPOINT={endpoint}: {state_of(endpoint)}"


def state_of(endpoint: str) -> str:
    """State of the endpoint (connects, unknown host, unreachable), and the fix."""
    host = endpoint
    try:
        host, port = hosts.split(endpoint)
        # As torchrun: this host need not know its own name.
        reached = hosts.LOOPBACK if hosts.is_this_host(host) else host
        with socket.create_connection((reached, port), timeout=5):
            return (
                "it accepts connections, so either fewer nodes than NNODES have joined, or another "
                "program listens there: take another port"
            )
    except socket.gaierror:
        return f"this machine does not know the host {host}"
    except (OSError, ValueError) as error:
        return f"it cannot be reached ({error}): its launcher must run and its port be open"


Facts = Mapping[str, str]


def facts_of(arguments: Sequence[str]) -> Facts:
    """Name -> value of what all launchers must have in common; the first difference is reported."""
    return {
        "NNODES": option(arguments, "--nnodes") or "1",
        "torch": importlib.metadata.version("torch"),
        "titan_dit": titan_dit.__version__,
        "the files of titan_dit": digest_of(Path(titan_dit.__file__).parent),
    }


def digest_of(package: Path) -> str:
    """Digest of a package's Python files and their names."""
    found = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        content = file.read_bytes()
        found.update(f"{file.relative_to(package)} {len(content)}\n".encode() + content)
    return found.hexdigest()[:12]


def check(
    mine: Facts, say: Callable[[str], None], compare_set: Callable[..., bytes], run_id: str
) -> None:
    """Compare with the first launcher of this run; raises UserError if they differ.

    `compare_set`: that of the store. Another run id is reported only: two jobs may share a store.
    """
    found: bytes = compare_set(f"titan_dit.facts.{run_id}", "", json.dumps(mine))
    first: dict[str, Any] = json.loads(found)
    for name, value in mine.items():
        if first.get(name) != value:
            raise UserError(
                f"{name} differs between the hosts of this run: {value} here, and "
                f"{first.get(name)} where it was launched first. Launch it alike on all hosts."
            )
    other = compare_set("titan_dit.run_id", "", run_id).decode()
    if other != run_id:
        say(
            f"RDZV_ID={run_id}, but the first launcher at this RDZV_ENDPOINT has {other}: only "
            "launchers with the same RDZV_ID meet"
        )
