"""Times of a rendezvous, judged without comparing the clocks of several machines.

Private parts of torch's dynamic rendezvous are in this file and in agent.py.
"""

from __future__ import annotations

import pickle
import sys
import time
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any, ClassVar

from torch.distributed.elastic.rendezvous import RendezvousConnectionError, dynamic_rendezvous

from titan_dit.launcher.lasting_store import LastingStore
from titan_dit.launcher.torch_range import require

StateHolder: Any = dynamic_rendezvous._BackendRendezvousStateHolder


def watch_locally() -> None:
    """Have torch's rendezvous judge times as `LocalWatch` does, by a `SteadyClock`.

    Also replaces what names the caller in its records, by `calling_function`.
    """
    require("launcher/heartbeats.py", dynamic_rendezvous, "get_method_name")
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
