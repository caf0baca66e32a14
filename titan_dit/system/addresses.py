"""The network interfaces of this host and their addresses."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from contextlib import suppress

SIOCGIFADDR = 0x8915
"""Linux: the IPv4 address of an interface."""


def interfaces() -> dict[str, str]:
    """Interface -> IPv4 address, of those that have one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                request = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(probe, SIOCGIFADDR, request)
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def own_addresses() -> tuple[str, ...]:
    """Addresses at which other ranks may reach this host, the most likely first."""
    known = interfaces()
    wanted = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
    first = [known[name] for name in wanted if name in known]
    named = []
    with suppress(OSError):
        named = [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)]
    others = [address for name, address in known.items() if name != "lo"]
    every = dict.fromkeys([*first, *others, *named, "127.0.0.1"])
    # Loopback is for ranks of this host without a common Unix socket.
    return tuple(sorted(every, key=lambda address: address.startswith(("127.", "::1"))))


def address_of(network: str) -> str | None:
    """The address of an interface, or `network` itself if it is an address of this host.

    None for anything else.
    """
    if address := interfaces().get(network):
        return address
    family = socket.AF_INET6 if ":" in network else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            socket.inet_pton(family, network)
            probe.bind((network, 0))
        except OSError:
            return None
    return network
