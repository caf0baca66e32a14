"""Which nodes of a rendezvous are alive, judged without comparing the clocks of several machines.

Private parts of torch's dynamic rendezvous are in this file and in agent.py.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any

from torch.distributed.elastic.rendezvous import dynamic_rendezvous

StateHolder: Any = dynamic_rendezvous._BackendRendezvousStateHolder


def watch_locally() -> None:
    """Have torch's rendezvous judge heartbeats as `LocalWatch` does."""
    dynamic_rendezvous._BackendRendezvousStateHolder = LocalWatch  # type: ignore[misc, assignment]


def cache_s(interval_s: int) -> int:
    """Seconds between reads of the state: each fetches that of all nodes from one host."""
    return max(1, interval_s // 3)


class LocalWatch(StateHolder):  # type: ignore[misc]
    """The shared state of a rendezvous, in which a silent node is lost by this node's own watch.

    A heartbeat is the wall clock of its sender. torch compares it with the wall clock of every
    other node, so that a skewed clock loses a healthy node. Here only its changes count: a node is
    lost if this one has watched it for the whole window (interval x attempts) and saw no change.
    While this node was stalled, or could not reach the store, it has watched nobody.
    """

    def __init__(self, backend: Any, settings: Any) -> None:
        interval: timedelta = settings.keep_alive_interval
        super().__init__(backend, settings, cache_duration=cache_s(interval.seconds))
        self.longest = max(2.0, interval.total_seconds())
        self.moment, self.watched = time.monotonic(), 0.0
        self.seen: dict[Any, tuple[datetime, float]] = {}
        """Node -> its heartbeat, and how long this node had watched when it changed."""

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
            beats[node] = datetime.now(UTC) - silent
        super()._sanitize()
        # The state goes back to all nodes: with the heartbeats as they were sent.
        for node in self._state.last_heartbeats:
            self._state.last_heartbeats[node] = sent[node]
