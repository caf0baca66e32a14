"""A launcher's store of the rendezvous: it outlives a cut network, and judges by its own clock.

The launcher calls `connect_again` and `watch_locally`; both replace parts of torch.

torch's client waits without limit for an answer that was lost with the network, and never
connects again. TCP repeats what was lost at doubling intervals: after a cut of 26 s perhaps 25 s
late. torch's heartbeats are wall-clock times of their senders; here each node judges them by its
own monotonic clock. Private parts of torch's rendezvous are in this file and in agent.py.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any, ClassVar

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    c10d_rendezvous_backend,
    dynamic_rendezvous,
)

from titan_dit.ranks.torch_range import require

SILENT_S = 4
"""The connection is dropped if the other host's kernel confirms nothing for this long."""
CONNECT_S = 1.0
"""Timeout of an attempt to connect, and the least time from one attempt to the next."""
NOTICE_S = 3.0
"""A store that is gone longer is reported."""
GONE_S = 120.0
"""The launcher ends once the store has been gone for this long."""
REFUSED_S = 10.0
"""The launcher ends sooner if the host refuses connections: the launcher there has ended."""

Backend: Any = c10d_rendezvous_backend.C10dRendezvousBackend
Store: Any = dist.Store  # type: ignore[attr-defined]
TCPStore: Any = dist.TCPStore  # type: ignore[attr-defined]


def connect_again(say: Callable[[str], None], check: Callable[..., None]) -> None:
    """Have torch's rendezvous use a `LastingStore` where another host has the store.

    `check(compare_set, run_id)` compares this launcher with the others, and may raise UserError.
    """
    torch: Any = c10d_rendezvous_backend
    require("launcher/store.py", torch, "TCPStore", "C10dRendezvousBackend")

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

    Its operations try until `is_gone`, and raise RendezvousConnectionError then. One that
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
            except dist.DistNetworkError as error:
                if self.is_gone:
                    raise RendezvousConnectionError(str(error)) from error
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


StateHolder: Any = dynamic_rendezvous._BackendRendezvousStateHolder


def watch_locally() -> None:
    """Have torch's rendezvous judge times as `LocalWatch` does, by a `SteadyClock`.

    Also replaces what names the caller in its records, by `calling_function`.
    """
    require("launcher/store.py", dynamic_rendezvous, "get_method_name")
    dynamic_rendezvous._BackendRendezvousStateHolder = LocalWatch  # type: ignore[misc, assignment]
    dynamic_rendezvous.datetime = SteadyClock  # type: ignore[attr-defined]
    dynamic_rendezvous.get_method_name = calling_function


def calling_function(depth: int = 2) -> str:
    """The name of the function `depth` frames above this one.

    torch takes 20 to 100 ms of CPU for it, by inspect.stack, three times between reading the
    shared state and writing it. On a busy machine other nodes write in between, each time: a node
    that joins is then never seen.
    """
    return sys._getframe(depth).f_code.co_name


def cache_s(interval_s: int) -> int:
    """Seconds between reads of the state: each fetches that of all nodes from one host."""
    return max(1, interval_s // 3)


class SteadyClock(datetime):
    """`datetime` for torch's rendezvous: `now` continues evenly when the wall clock is set.

    torch sends a heartbeat once the last one is old enough. A wall clock that is set back would
    silence its own node.
    """

    wall: ClassVar[datetime] = datetime.now(UTC)
    moment: ClassVar[float] = time.monotonic()

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
        """The wall clock at import plus the time since; a plain datetime, for the store."""
        return (cls.wall + timedelta(seconds=time.monotonic() - cls.moment)).astimezone(tz)


class LocalWatch(StateHolder):  # type: ignore[misc]
    """The shared state of a rendezvous, with its times judged by this node's own watch.

    A heartbeat is the wall clock of its sender. torch compares it with the wall clock of every
    other node, so that a skewed clock loses a healthy node. Here only its changes count: a node is
    lost if this one has watched it for the whole window (interval x attempts) and saw no change.
    While this node was stalled, or could not reach the store, it has watched nobody.

    The deadline of the last call, too, is the wall clock of the node that set it. Here only its
    presence counts: the last call lasts from the moment at which this node first saw it. The first
    node for which it is over ends it for all.

    While the store is out of reach the state stays as this node last saw it.
    """

    def __init__(self, backend: Any, settings: Any) -> None:
        interval: timedelta = settings.keep_alive_interval
        super().__init__(backend, settings, cache_duration=cache_s(interval.seconds))
        self.longest = max(2.0, interval.total_seconds())
        self.moment, self.watched = time.monotonic(), 0.0
        self.seen: dict[Any, tuple[datetime, float]] = {}
        """Node -> its heartbeat, and how long this node had watched when it changed."""
        self.last_call_s: float = settings.timeout.last_call.total_seconds()
        self.last_call: float | None = None
        """When the last call ends, by this node's monotonic clock; None without one."""
        self.synced: bytes = pickle.dumps(self.state)
        """The state as last read or written."""

    def sync(self) -> bool | None:
        """Read or write the state as torch does.

        Without the store: False, and the state without the changes that could not be written.
        Raises RendezvousConnectionError once the store is gone for too long.
        """
        try:
            has_set: bool | None = super().sync()
        except RendezvousConnectionError:
            self._state, self._dirty = pickle.loads(self.synced), False
            store = getattr(self._backend, "_store", None)
            if not isinstance(store, LastingStore) or store.lost is None or store.is_gone:
                raise
            return False
        self.synced = pickle.dumps(self.state)
        return has_set

    def close(self) -> None:
        """Close the rendezvous for all nodes, past this state, which the main thread may use."""
        while found := self._backend.get_state():
            state = pickle.loads(found[0])
            state.closed = True
            written = self._backend.set_state(pickle.dumps(state), found[1])
            if written and written[2]:  # Else another node has written in between.
                return

    def _sanitize(self) -> None:
        """Remove lost nodes: as torch does, but with the heartbeats in local time."""
        now = time.monotonic()
        self.watched += min(now - self.moment, self.longest)
        self.moment = now
        beats: dict[Any, datetime] = self._state.last_heartbeats
        sent = dict(beats)
        known, self.seen = self.seen, {}
        for node, beat in sent.items():
            last = known.get(node)
            self.seen[node] = last if last and last[0] == beat else (beat, self.watched)
            silent = timedelta(seconds=self.watched - self.seen[node][1])
            beats[node] = SteadyClock.now(UTC) - silent
        super()._sanitize()
        # The state goes back to all nodes: with the heartbeats as they were sent.
        for node in self._state.last_heartbeats:
            self._state.last_heartbeats[node] = sent[node]
        self._set_deadline(now)

    def _set_deadline(self, now: float) -> None:
        """Put the deadline of the last call, if there is one, into local time.

        It goes back to the store so; every node that reads it puts its own in its place.
        """
        if self._state.deadline is None:
            self.last_call = None
            return
        if self.last_call is None:
            self.last_call = now + self.last_call_s
        self._state.deadline = SteadyClock.now(UTC) + timedelta(seconds=self.last_call - now)
