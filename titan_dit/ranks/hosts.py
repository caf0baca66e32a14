"""Host names, network interfaces and addresses of a launch.

torch asks for this host's own name in three places: torchrun to know whether it is RDZV_ENDPOINT's
host, rank 0's node to tell all ranks where they meet (MASTER_ADDR), gloo to choose the address of
its sockets. The name may be unknown, or an address that other hosts cannot reach.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import re
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress

from titan_dit.config.section import UserError
from titan_dit.ranks.failure import NetworkFailure

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


WAIT_S = 60.0
"""A name may become known after the launch: those of pods do when the pods have started."""
LOOPBACK = "127.0.0.1"
OUTSIDE = "192.0.2.1"
"""No host has this address (RFC 5737): the route to it is the default one."""
DEFAULT_PORT = 29400
"""torchrun's, if RDZV_ENDPOINT names none."""
FIX = "Correct it, add the name to /etc/hosts, or give the address"


def split(endpoint: str) -> tuple[str, int]:
    """Host and port of "host:port", "host" or "[IPv6]:port"."""
    host, colon, port = endpoint.strip().rpartition(":")
    if not colon or endpoint.endswith("]"):
        host, port = endpoint.strip(), str(DEFAULT_PORT)
    host = re.sub(r"^\[(.*)\]$", r"\1", host)
    if not re.fullmatch(r"[\w.:-]+", host) or not re.fullmatch(r"\d{1,5}", port):
        raise UserError(f"RDZV_ENDPOINT={endpoint}: set host:port, such as node1:29500.")
    if int(port) >= 1 << 16:
        raise UserError(f"RDZV_ENDPOINT={endpoint}: set a port below {1 << 16:,}.")
    return host, int(port)


def addresses(host: str) -> list[str]:
    """The addresses of a host; none if its name is unknown."""
    with suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)
        return [str(info[4][0]) for info in found]
    return []


def wait_for(host: str) -> list[str]:
    """The addresses of a host, once its name is known; none if it stays unknown for WAIT_S."""
    deadline = time.monotonic() + WAIT_S
    while not (found := addresses(host)) and time.monotonic() < deadline:
        time.sleep(min(1.0, WAIT_S))
    return found


def is_loopback(host: str) -> bool:
    """True for localhost and the addresses of loopback."""
    with suppress(ValueError):
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    return host == "localhost"


def is_this_host(host: str) -> bool:
    """True if a name or address is this host's, of any of its network interfaces."""
    own = socket.gethostname()
    if host == own or is_loopback(host):
        return True
    known = addresses(host)
    # The name may be a public address that no interface has.
    return any(address_of(address) for address in known) or bool({*known} & {*addresses(own)})


def has_good_name() -> bool:
    """True if gloo finds an address by this host's name that other hosts can reach."""
    own = (a for a in addresses(socket.gethostname()) if address_of(a))
    return not is_loopback(next(own, LOOPBACK))


def address_towards(address: str) -> str | None:
    """This host's address on the route to another one; None without a route. Sends nothing."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return str(probe.getsockname()[0])
    return None


def own_address(meeting: str) -> str | None:
    """This host's address for a launch that meets at the host `meeting`.

    None if the name of this host gives a good one.
    """
    if is_loopback(meeting):
        return LOOPBACK
    if has_good_name():
        return None
    # The host of the meeting may have the loopback address in its own /etc/hosts.
    routes = [address_towards(address) for address in [*addresses(meeting), OUTSIDE]]
    others = (a for a in [*routes, *interfaces().values()] if a and not is_loopback(a))
    return next(others, LOOPBACK)


def torchrun_options(arguments: Sequence[str], endpoint: str | None) -> list[str]:
    """Arguments for torchrun, with this host's address where its name gives none.

    `endpoint` is RDZV_ENDPOINT, None on a single node, which needs no name but localhost.

    Raises:
        UserError: no endpoint, or localhost is unknown.
        NetworkFailure: the endpoint's host is unknown.
    """
    if endpoint is None:
        if not addresses("localhost"):
            raise UserError(
                f"this host does not know the name localhost. Add a line to /etc/hosts: "
                f"{LOOPBACK} localhost"
            )
        return ["--local-addr", LOOPBACK, *arguments]
    host, port = split(endpoint)
    options = list(arguments)
    if not is_this_host(host) and not wait_for(host):
        raise NetworkFailure(
            f"RDZV_ENDPOINT={endpoint}: this host, {socket.gethostname()}, does not know the host "
            f"{host}. {FIX}: RDZV_ENDPOINT=ADDRESS:{port}."
        )
    conf = options.index("--rdzv-conf") + 1 if "--rdzv-conf" in options else None
    if conf is None or "is_host=" not in options[conf]:
        if is_this_host(host):
            # torchrun knows this host by loopback, whatever its name; the store listens everywhere.
            options[options.index("--rdzv-endpoint") + 1] = f"{LOOPBACK}:{port}"
        elif not addresses(socket.gethostname()):
            options = with_conf(options, conf)
    address = own_address(host)
    return ["--local-addr", address, *options] if address else options


def with_conf(options: list[str], conf: int | None) -> list[str]:
    """Options that say that this host is not RDZV_ENDPOINT's: torchrun would ask for its name."""
    if conf is None:
        return ["--rdzv-conf", "is_host=0", *options]
    return [*options[:conf], f"{options[conf]},is_host=0".lstrip(","), *options[conf + 1 :]]


def unknown_names(endpoint: str | None) -> str:
    """Advice if torch fails to resolve a name nevertheless."""
    where = f"RDZV_ENDPOINT={endpoint}: " if endpoint else ""
    return (
        f"{where}this host's own name, {socket.gethostname()}, or another one is unknown. Add it "
        "to /etc/hosts, with this host's address"
    )


def choose_interface(meeting: str) -> None:
    """Set GLOO_SOCKET_IFNAME for ranks that meet at MASTER_ADDR, unless it is set or not needed."""
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return
    address = own_address(meeting)
    names = [name for name, known in interfaces().items() if known == address]
    if names:
        os.environ["GLOO_SOCKET_IFNAME"] = names[0]
