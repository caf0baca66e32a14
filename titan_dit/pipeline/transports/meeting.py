"""How two ranks meet: one socket for their notices, Unix within a host and TCP between hosts.

Addresses travel by a collective of the pipeline's own process group. Two ranks are on one host if
they can meet at an abstract Unix socket, which has no file and by which files can be passed.
"""

from __future__ import annotations

import array
import hashlib
import os
import secrets
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing, suppress
from typing import NamedTuple

import torch.distributed as dist

from titan_dit.ranks.failure import NetworkFailure
from titan_dit.ranks.hosts import own_addresses

HEADER = struct.Struct("<HHII")
"""Lane, number of files, number of the message, bytes of the payload."""
FAREWELL = 0xFFFF
"""The lane of the last notice of a rank that closes its transport."""
HELLO = struct.Struct("<16sI")
"""The token of the listening rank, and the rank that comes."""
MEETING_S = 60.0
"""Ranks that have gathered their addresses meet within this time."""
CONNECT_S = 3.0
"""Timeout of a connection to one address of another host."""
ITEM = array.array("i").itemsize
READ = 1 << 16
"""Bytes of a read."""
MAX_FILES = 16
"""Files that come with one read."""


class Notice(NamedTuple):
    """A few bytes about a message of a lane, with open files if the ranks share a host."""

    lane: int
    number: int
    payload: bytes = b""
    files: tuple[int, ...] = ()


class Door(NamedTuple):
    """Port and addresses at which a rank listens, and its token."""

    token: bytes
    port: int
    addresses: tuple[str, ...]

    @property
    def unix(self) -> str:
        """The name of its abstract Unix socket."""
        # Names are public (/proc/net/unix), the token is not.
        return f"\0titan_dit-{hashlib.sha256(self.token).hexdigest()[:32]}"


class Peer:
    """This rank's end of the socket to another rank."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank, self.socket = rank, connection
        self.is_local = connection.family == socket.AF_UNIX
        self.backlog: deque[tuple[bytes, Sequence[int]]] = deque()
        self.read, self.files = bytearray(), deque[int]()
        self.has_left = False
        connection.setblocking(False)
        if not self.is_local:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            # A host without power is missed after two minutes, not after two hours.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 6)

    @property
    def has_backlog(self) -> bool:
        """True while notices wait for room in the socket."""
        return bool(self.backlog)

    def tell(self, lane: int, number: int, payload: bytes = b"", files: Sequence[int] = ()) -> None:
        """Send a notice; never blocks. Closes the files once they are sent."""
        header = HEADER.pack(lane, len(files), number, len(payload))
        self.backlog.append((header + payload, files))
        self.write()

    def write(self) -> None:
        """Write what the socket has room for. Raises NetworkFailure if the peer has ended."""
        while self.backlog and not self.has_left:
            data, files = self.backlog.popleft()
            try:
                sent = self.push(data, files)
            except BlockingIOError:
                self.backlog.appendleft((data, files))
                return
            except OSError as error:
                raise self.lost() from error
            for file in files:
                os.close(file)
            if data[sent:]:
                self.backlog.appendleft((data[sent:], ()))

    def push(self, data: bytes, files: Sequence[int]) -> int:
        """Hand bytes and files to the socket; return the number of bytes that it took."""
        if not files:
            return self.socket.send(data, socket.MSG_NOSIGNAL)
        # As `socket.send_fds`, which ignores its flags.
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
        return self.socket.sendmsg([data], rights, socket.MSG_NOSIGNAL)

    def exchange(self) -> list[Notice]:
        """Write what waits, read what has come; never blocks.

        Raises:
            NetworkFailure: the other rank has ended without `close`.
        """
        if self.has_left:
            return []
        if self.backlog:
            self.write()
        notices: list[Notice] = []
        may_have_more = True
        while may_have_more and not self.has_left:
            may_have_more = self.fill()
            notices += self.parsed()
        return notices

    def fill(self) -> bool:
        """Read once; False if nothing more is there.

        Raises NetworkFailure if the peer has ended.
        """
        try:
            # As `socket.recv_fds`, which ignores its flags.
            room = socket.CMSG_LEN(MAX_FILES * ITEM) if self.is_local else 0
            data, rights, flags, _ = self.socket.recvmsg(READ, room, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return False
        except OSError as error:
            raise self.lost() from error
        if not data:
            raise self.lost()
        if flags & socket.MSG_CTRUNC:
            raise NetworkFailure(
                f"pipeline rank {self.rank} passes more open files than this rank may hold. Raise "
                "the limit of open files (ulimit -n)."
            )
        self.read += data
        for _, _, passed in rights:
            self.files += array.array("i", passed[: len(passed) // ITEM * ITEM])
        # A read ends at passed files.
        return len(data) == READ or bool(rights)

    def parsed(self) -> list[Notice]:
        """The whole notices that were read."""
        notices, start = [], 0
        while len(self.read) - start >= HEADER.size:
            lane, files, number, size = HEADER.unpack_from(self.read, start)
            begin = start + HEADER.size
            if len(self.read) < begin + size:
                break
            start = begin + size
            if lane == FAREWELL:
                self.has_left = True
                break
            passed = tuple(self.files.popleft() for _ in range(files))
            notices.append(Notice(lane, number, bytes(self.read[begin:start]), passed))
        del self.read[:start]
        return notices

    def lost(self) -> NetworkFailure:
        """The error of a rank that has ended (launcher/cause.py knows the first words)."""
        return NetworkFailure(f"Connection closed by peer: pipeline rank {self.rank} has ended.")

    def close(self) -> None:
        """Say farewell and close the socket."""
        if not self.has_left:
            with suppress(NetworkFailure):  # It has ended first.
                self.tell(FAREWELL, 0)
        self.socket.close()
        for file in self.files:
            os.close(file)


def meet(
    group: dist.ProcessGroup, ranks: Iterable[int], *, across_hosts: bool = False
) -> dict[int, Peer]:
    """Connect this rank of a group with some others, which name it, too. Collective.

    `across_hosts`: meet as if no other rank were on this host.
    """
    own, others = dist.get_rank(group), sorted(set(ranks))
    with ExitStack() as stack:
        token = secrets.token_bytes(HELLO.size - 4)
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        dual = family == socket.AF_INET6
        outside = socket.create_server(("", 0), family=family, dualstack_ipv6=dual)
        listeners = [stack.enter_context(closing(outside))]
        door = Door(token, outside.getsockname()[1], own_addresses())
        if not across_hosts:
            inside = stack.enter_context(closing(socket.socket(socket.AF_UNIX)))
            inside.bind(door.unix)
            inside.listen()
            listeners.append(inside)
        doors: list[Door] = [door] * dist.get_world_size(group)
        dist.all_gather_object(doors, door, group=group)
        deadline = time.monotonic() + MEETING_S
        found = {rank: visit(doors[rank], own, rank) for rank in others if rank < own}
        coming = {rank for rank in others if rank > own}
        while coming:
            rank, connection = welcome(listeners, token, coming, deadline)
            found[rank] = connection
            coming.remove(rank)
    return {rank: Peer(rank, connection) for rank, connection in sorted(found.items())}


def visit(door: Door, own: int, rank: int) -> socket.socket:
    """Connect to a rank that listens.

    Raises:
        NetworkFailure: none of its addresses can be reached.
    """
    ways: list[tuple[socket.AddressFamily, object]] = [(socket.AF_UNIX, door.unix)]
    for host in door.addresses:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        ways.append((family, (host, door.port)))
    for family, address in ways:
        connection = socket.socket(family)
        connection.settimeout(CONNECT_S)
        try:
            connection.connect(address)  # type: ignore[arg-type]
            connection.sendall(HELLO.pack(door.token, own))
            # It listens, but first visits ranks itself.
            connection.settimeout(MEETING_S)
            if connection.recv(1):
                return connection
        except OSError:
            pass  # The next address; a foreign host may have the same private one.
        connection.close()
    raise NetworkFailure(
        f"pipeline rank {own} cannot reach rank {rank} at {', '.join(door.addresses)}, port "
        f"{door.port}. Open the firewall between the hosts, or name the network interface in "
        "GLOO_SOCKET_IFNAME."
    )


def welcome(
    listeners: Sequence[socket.socket], token: bytes, coming: set[int], deadline: float
) -> tuple[int, socket.socket]:
    """Accept the connection of one of the ranks that come.

    Raises:
        NetworkFailure: none comes in time.
    """
    while (left := deadline - time.monotonic()) > 0:
        poll = select.poll()  # Not select(), which takes no file above 1023.
        for listener in listeners:
            poll.register(listener, select.POLLIN)
        ready = {file for file, _ in poll.poll(left * 1e3)}
        for listener in [listener for listener in listeners if listener.fileno() in ready][:1]:
            connection, _ = listener.accept()
            connection.settimeout(CONNECT_S)
            try:
                said, rank = HELLO.unpack(connection.recv(HELLO.size, socket.MSG_WAITALL))
                if said == token and rank in coming:
                    connection.sendall(b"!")
                    return rank, connection
            except (OSError, struct.error):
                pass  # Not one of ours.
            connection.close()
    raise NetworkFailure(
        f"pipeline ranks {sorted(coming)} have not come within {MEETING_S:.0f} s: they cannot "
        "reach this host. Open the firewall between the hosts, or name the network interface in "
        "GLOO_SOCKET_IFNAME."
    )
