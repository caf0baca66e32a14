"""The nixl agent of a rank: RDMA writes into memory of another rank (github.com/ai-dynamo/nixl).

nixl moves the bytes by UCX: InfiniBand, RoCE, NVLink, and without them TCP or, within a host, CMA.
It is imported only here, and only when it was chosen. It has no thread of its own in our use: its
progress thread would take a whole core, also while nothing is sent.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import secrets
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from titan_dit.config.section import UserError
from titan_dit.ranks.failure import NetworkFailure
from titan_dit.ranks.hosts import interfaces
from titan_dit.ranks.torch_range import pip_install

SYSTEM = Path("/sys/class")


class Piece(NamedTuple):
    """Contiguous memory, as nixl describes it."""

    address: int
    num_bytes: int
    device: int
    """The index of its GPU in its own process; 0 in host memory."""


class Agent:
    """The end of one rank; all of its lanes share it. Used by one thread."""

    def __init__(self, device: torch.device, network: str = "") -> None:
        """`network`: an interface or address of this host, "" for all.

        Raises:
            UserError: nixl cannot be imported, or cannot use the network.
        """
        if network:
            os.environ["UCX_NET_DEVICES"] = ucx_devices(interface_of(network))
        try:
            from nixl._api import nixl_agent, nixl_agent_config
        except (ImportError, OSError) as error:
            install = pip_install("'titan_dit[rdma]'")
            raise UserError(
                f'[pipeline] transport="nixl": nixl cannot be imported ({error}). Run '
                f'{install}, or set transport = "process_group".'
            ) from error
        logging.getLogger("nixl").setLevel(logging.WARNING)  # It announces every agent.
        self.memory = "VRAM" if device.type == "cuda" else "DRAM"
        self.index = device.index or 0
        settings = nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        try:
            self.nixl: Any = nixl_agent(secrets.token_hex(8), settings)
        except Exception as error:  # Its own classes are those of the package for this CUDA.
            raise UserError(
                f'[pipeline] transport="nixl" with network="{network}" cannot start: {error}. '
                'Name another network, or set transport = "process_group".'
            ) from error

    def piece(self, address: int, num_bytes: int) -> Piece:
        """Memory of this rank."""
        return Piece(address, num_bytes, self.index)

    def register(self, pieces: Sequence[Piece]) -> Any:
        """Let the network read and write memory, until `release`."""
        return self.nixl.register_memory([(*piece, "") for piece in pieces], self.memory)

    def release(self, registered: Any) -> None:
        """Undo `register`."""
        self.nixl.deregister_memory(registered)

    def describe(self, registered: Any) -> bytes:
        """Addresses and keys by which another rank writes into this agent's registered memory."""
        described: bytes = self.nixl.get_partial_agent_metadata(registered, inc_conn_info=True)
        return described

    def meet(self, described: bytes) -> str:
        """The name of the agent that described some memory; may be called again for more of it."""
        name: str | bytes = self.nixl.add_remote_agent(described)
        return name.decode() if isinstance(name, bytes) else name

    def write(self, sources: Sequence[Piece], targets: Sequence[Piece], name: str) -> Any:
        """Start writing pieces into equally large ones of another agent.

        The write progresses only while `is_done` is called. Raises NetworkFailure if it cannot
        start.
        """
        here = self.nixl.get_xfer_descs([tuple(piece) for piece in sources], self.memory)
        there = self.nixl.get_xfer_descs([tuple(piece) for piece in targets], self.memory)
        try:
            transfer = self.nixl.initialize_xfer("WRITE", here, there, name)
            self.nixl.transfer(transfer)
        except Exception as error:  # nixl's own classes.
            raise failed(error) from error
        return transfer

    def is_done(self, transfer: Any) -> bool:
        """Let a write progress; True if all of it is in the other rank's memory.

        Raises NetworkFailure if it failed.
        """
        try:
            state = self.nixl.check_xfer_state(transfer)
        except Exception as error:  # nixl's own classes.
            raise failed(error) from error
        if state == "DONE":
            transfer.release()
        elif state != "PROC":
            raise failed(state)
        return bool(state == "DONE")

    def progress(self) -> None:
        """Let others write: without RDMA (TCP) UCX needs this rank's help."""
        self.nixl.get_new_notifs()


def failed(why: object) -> NetworkFailure:
    """The error of a write (launcher/cause.py knows the first words)."""
    return NetworkFailure(f"Connection closed by peer: nixl could not write to a rank: {why}.")


def interface_of(network: str) -> str:
    """The interface that is named, or has the address.

    Raises:
        UserError: this host has none.
    """
    if network in (name for _, name in socket.if_nameindex()):
        return network
    with suppress(ValueError):
        wanted = ipaddress.ip_address(network)
        for name, address in addresses():
            if ipaddress.ip_address(address) == wanted:
                return name
    raise UserError(
        f"[pipeline] network={network!r}: this host has no such interface or address. Set one of "
        f"{', '.join(name for _, name in socket.if_nameindex())}."
    )


def addresses(table: Path = Path("/proc/net/if_inet6")) -> Iterator[tuple[str, str]]:
    """(interface, address) of this host, IPv4 and IPv6."""
    yield from interfaces().items()
    with suppress(OSError):
        for line in table.read_text().splitlines():
            digits, *_, name = line.split()
            yield name, str(ipaddress.IPv6Address(bytes.fromhex(digits)))


def ucx_devices(interface: str, system: Path = SYSTEM) -> str:
    """UCX_NET_DEVICES: the RDMA ports of an interface, and the interface itself for TCP."""
    own = [path.name for path in system.glob(f"net/{interface}/device/infiniband/*")]
    ports = [
        f"{port.parent.parent.name}:{port.name}"
        for port in sorted(system.glob("infiniband/*/ports/*"))
        if port.parent.parent.name in own or interface in interfaces_of(port)
    ]
    return ",".join([*ports, interface])


def interfaces_of(port: Path) -> set[str]:
    """The interfaces of an RDMA port (RoCE; those of a bond, too)."""
    found = set()
    for entry in port.glob("gid_attrs/ndevs/*"):
        with suppress(OSError):  # An unused entry cannot be read.
            found.add(entry.read_text().strip())
    return found
