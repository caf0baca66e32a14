"""A launcher's connection to the store of the rendezvous, which survives a cut of the network.

torch's client waits without limit for an answer that was lost with the network, and never connects
again. TCP repeats what was lost at doubling intervals: after a cut of 26 s perhaps 25 s late.

Private parts of torch's c10d rendezvous are in this file.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, c10d_rendezvous_backend

from titan_dit.launcher.torch_range import require

SILENT_S = 4
"""The connection is dropped if the other host's kernel confirms nothing for this long."""
CONNECT_S = 1.0
"""Timeout of an attempt to connect, and the least time from one attempt to the next."""
NOTICE_S = 3.0
"""A store that is gone longer is reported."""
GONE_S = 120.0
"""Without the store for longer, the launcher ends."""
REFUSED_S = 10.0
"""The same if its host refuses connections: the launcher there has ended."""

Backend: Any = c10d_rendezvous_backend.C10dRendezvousBackend
Store: Any = dist.Store  # type: ignore[attr-defined]
TCPStore: Any = dist.TCPStore  # type: ignore[attr-defined]


def connect_again(say: Callable[[str], None], check: Callable[..., None]) -> None:
    """Have torch's rendezvous use a `LastingStore` where another host has the store.

    `check(compare_set, run_id)` compares this launcher with the others, and may raise UserError.
    """
    torch: Any = c10d_rendezvous_backend
    require("launcher/lasting_store.py", torch, "TCPStore", "C10dRendezvousBackend")

    def store(host: str, port: int, *, is_master: bool, **options: Any) -> Any:
        if is_master:
            return TCPStore(host, port, is_master=True, **options)
        return LastingStore(host, port, options["timeout"], say)

    class Checked(QuickBackend):
        def __init__(self, store: Any, run_id: str) -> None:
            super().__init__(store, run_id)
            check(store.compare_set, run_id)

    torch.TCPStore, torch.C10dRendezvousBackend = store, Checked


class QuickBackend(Backend):  # type: ignore[misc]
    """Reads and writes the state of the rendezvous in one attempt: `LocalWatch` tries again."""

    _store: Any

    def _call_store(self, store_op: str, *args: Any, **kwargs: Any) -> Any:
        store = self._store
        if not isinstance(store, LastingStore):
            return super()._call_store(store_op, *args, **kwargs)
        try:
            return store.once(store_op, *args)
        except (ValueError, RuntimeError, TimeoutError) as error:
            raise RendezvousConnectionError(str(error)) from error


class LastingStore(Store):  # type: ignore[misc]
    """A client of a TCPStore that drops a dead connection and opens another one.

    Its operations try for as long as `is_gone` is False, and raise DistNetworkError then. One that
    was done when its answer was lost is done twice. Only `add` notices, at the end of a job, where
    a launcher may then end before the others.
    """

    def __init__(
        self, host: str, port: int, timeout: timedelta, say: Callable[[str], None]
    ) -> None:
        super().__init__()
        self.host, self.port, self.say = host, port, say
        self.set_timeout(timeout)
        self.lock = threading.Lock()
        self.client: Any = self.open(timeout)
        self.lost: float | None = None
        """When the connection was found dead; None while there is one."""
        self.tried, self.why, self.is_refused, self.is_reported = 0.0, "", False, False
        self.is_needed = True
        """False at the end of the job: another launcher may have ended first."""

    @property
    def is_gone(self) -> bool:
        """True if the store has been out of reach for too long."""
        limit = (REFUSED_S if self.is_refused else GONE_S) if self.is_needed else 0.0
        return self.lost is not None and time.monotonic() - self.lost > limit

    def open(self, timeout: timedelta) -> Any:
        """Connect; the connection ends if the other host is silent."""
        client = TCPStore(self.host, self.port, is_master=False, timeout=timeout)
        client.set_timeout(self.timeout)
        notice_silence(self.port)
        return client

    def once(self, operation: str, *given: Any) -> Any:
        """One attempt at an operation; raises DistNetworkError without a connection."""
        with self.lock:
            client = self.client or self.reconnect()
        try:
            result = getattr(client, operation)(*given)
            if operation in ("set", "multi_set"):
                # torch's client does not wait for an answer: the network may have lost it.
                client.check(given[0] if operation == "multi_set" else [given[0]])
            return result
        except dist.DistNetworkError as error:
            with self.lock:
                if self.client is client:
                    self.client, self.lost, self.tried = None, time.monotonic(), 0.0
                    self.why = str(error).splitlines()[0]
            raise

    def reconnect(self) -> Any:
        """Connect again, at most once in CONNECT_S."""
        now = time.monotonic()
        assert self.lost is not None
        if now - self.tried < CONNECT_S:
            time.sleep(0.1)
            raise dist.DistNetworkError(self.why)
        self.tried = now
        try:
            # torch's client would try for longer, and not say what failed.
            socket.create_connection((self.host, self.port), CONNECT_S).close()
            self.client = self.open(timedelta(seconds=CONNECT_S))
        except (OSError, RuntimeError) as error:
            self.is_refused = isinstance(error, ConnectionRefusedError)
            self.why = str(error).splitlines()[0]
            self.report()
            raise dist.DistNetworkError(self.why) from error
        if self.is_reported:
            self.say(f"the rendezvous is reached again after {now - self.lost:.0f} s")
        self.lost, self.is_refused, self.is_reported = None, False, False
        return self.client

    def report(self) -> None:
        """Say once that the store is gone."""
        assert self.lost is not None
        if self.is_needed and not self.is_reported and time.monotonic() - self.lost > NOTICE_S:
            self.is_reported = True
            limit = REFUSED_S if self.is_refused else GONE_S
            where = f"{self.host}:{self.port}"
            self.say(f"lost the rendezvous at {where} ({self.why}); trying for {limit:.0f} s")

    def lasting(self, operation: str, *given: Any) -> Any:
        """An operation, for as long as it takes to reach the store."""
        while True:
            if self.client:
                self.client.set_timeout(self.timeout)
            try:
                return self.once(operation, *given)
            except dist.DistNetworkError:
                if self.is_gone:
                    raise
                time.sleep(0.1)

    def set(self, key: str, value: Any) -> None:
        """See dist.Store, as for all below."""
        self.lasting("set", key, value)

    def get(self, key: str) -> bytes:  # noqa: D102
        found: bytes = self.lasting("get", key)
        return found

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:  # noqa: D102
        found: bytes = self.lasting("compare_set", key, expected, desired)
        return found

    def add(self, key: str, value: int) -> int:  # noqa: D102
        found: int = self.lasting("add", key, value)
        return found

    def check(self, keys: list[str]) -> bool:  # noqa: D102
        found: bool = self.lasting("check", keys)
        return found

    def wait(self, keys: list[str], *timeout: timedelta) -> None:  # noqa: D102
        self.lasting("wait", keys, *timeout)

    def multi_get(self, keys: list[str]) -> list[bytes]:  # noqa: D102
        found: list[bytes] = self.lasting("multi_get", keys)
        return found

    def multi_set(self, keys: list[str], values: list[Any]) -> None:  # noqa: D102
        self.lasting("multi_set", keys, values)


def notice_silence(port: int) -> None:
    """Have Linux end this process's connections to a port after SILENT_S of silence.

    Of data that is not confirmed (TCP_USER_TIMEOUT), and of an idle connection (keepalive). A
    process that is stopped is not silent: its kernel confirms.
    """
    if not hasattr(socket, "TCP_USER_TIMEOUT"):
        return
    for entry in Path("/proc/self/fd").iterdir():
        number = int(entry.name)
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as connection:
                is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
                if is_tcp and connection.getpeername()[1] == port:
                    set_options(connection)


def set_options(connection: socket.socket) -> None:
    """See `notice_silence`."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, SILENT_S // 2),
        (socket.TCP_KEEPINTVL, 1),
        (socket.TCP_KEEPCNT, SILENT_S),
        (socket.TCP_USER_TIMEOUT, SILENT_S * 1000),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
