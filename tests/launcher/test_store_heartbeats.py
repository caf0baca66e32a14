"""A rendezvous counts by each node's own watch: no clock loses a node or ends the last call."""

import os
import pickle
import signal
import sys
import time
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from running import Running, free_port, is_open
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, dynamic_rendezvous

from titan_dit.launcher.store import LastingStore, LocalWatch, SteadyClock, watch_locally

SETTINGS = SimpleNamespace(
    **{"keep_alive_interval": timedelta(seconds=10), "keep_alive_max_attempt": 3},
    **{"min_nodes": 1, "max_nodes": 3, "run_id": "run"},
    timeout=dynamic_rendezvous.RendezvousTimeout(last_call=timedelta(seconds=30)),
)


class Shared:
    """The state in the store of the rendezvous."""

    def __init__(self, nodes):
        self.state = dynamic_rendezvous._RendezvousState()
        self.state.participants = {node: rank for rank, node in enumerate(nodes)}
        self.beat(*nodes)

    def beat(self, *nodes, skew=timedelta(0)):
        for node in nodes:
            self.state.last_heartbeats[node] = datetime.now(UTC) + skew

    def get_state(self):
        return pickle.dumps(self.state), b"token"

    def set_state(self, state, token):
        self.state = pickle.loads(state)
        return state, b"token", True


@pytest.fixture
def clock(monkeypatch):
    """A monotonic clock that `clock.pass_s` moves; wall clocks of heartbeats do not count."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(dynamic_rendezvous, "datetime", SteadyClock)

    def pass_s(seconds, watch, shared, *alive, skew=timedelta(0)):
        for _ in range(round(seconds / 5)):
            clock.now += 5
            shared.beat(*alive, skew=skew)
            watch.sync()

    clock.pass_s = pass_s
    return clock


@pytest.mark.parametrize("hours", [-1, 0, 1])
def test_a_nodes_clock_does_not_matter_and_its_silence_does(hours, clock):
    shared, skew = Shared("ab"), timedelta(hours=hours)
    shared.beat("b", skew=skew)
    watch = LocalWatch(shared, SETTINGS)
    watch.sync()
    clock.pass_s(100, watch, shared, "a", "b", skew=skew)
    assert set(watch.state.participants) == {"a", "b"}
    clock.pass_s(25, watch, shared, "a")
    assert set(watch.state.participants) == {"a", "b"}
    clock.pass_s(10, watch, shared, "a")
    assert set(watch.state.participants) == {"a"}


def test_who_was_stalled_itself_loses_nobody(clock):
    shared = Shared("ab")
    watch = LocalWatch(shared, SETTINGS)
    watch.sync()
    clock.now += 1000
    watch.sync()
    assert set(watch.state.participants) == {"a", "b"}
    clock.pass_s(25, watch, shared, "a")
    assert set(watch.state.participants) == {"a"}


def test_heartbeats_go_back_to_the_store_as_they_were_sent(clock):
    shared = Shared("ab")
    sent = dict(shared.state.last_heartbeats)
    watch = LocalWatch(shared, SETTINGS)
    for _ in range(3):
        clock.now += 5
        watch.sync()
        watch.mark_dirty()
    assert shared.state.last_heartbeats == sent


@pytest.mark.parametrize("hours", [-1, 0, 1])
def test_a_last_call_lasts_from_when_a_node_first_saw_it_and_no_node_extends_it(hours, clock):
    shared = Shared("ab")
    watches = [LocalWatch(shared, SETTINGS) for _ in "ab"]
    for watch in watches:
        watch.sync()
    shared.state.deadline = datetime.now(UTC) + timedelta(hours=hours, seconds=30)
    begun = clock.now
    for _ in range(20):
        clock.now += 5
        shared.beat("a", "b")
        for watch in watches:
            watch.sync()
            watch.mark_dirty()
            watch.sync()
        if any(is_over(watch, node) for watch, node in zip(watches, "ab", strict=True)):
            break
    assert 30 <= clock.now - begun <= 40


def test_each_last_call_has_its_whole_time(clock):
    shared = Shared("ab")
    watch = LocalWatch(shared, SETTINGS)
    for deadline in (datetime.now(UTC), None, datetime.now(UTC)):
        shared.state.deadline = deadline
        clock.pass_s(25, watch, shared, "a", "b")
        assert not is_over(watch, "a")


def is_over(watch, node):
    """True if torch's join of this node would complete the rendezvous."""
    seen = dynamic_rendezvous._RendezvousContext(node, watch.state, SETTINGS)
    act = dynamic_rendezvous._RendezvousJoinOp()(seen, time.monotonic() + 600)
    return act == dynamic_rendezvous._Action.MARK_RENDEZVOUS_COMPLETE


def test_a_node_whose_clock_is_set_back_sends_heartbeats_as_before(clock, monkeypatch):
    for name in ("datetime", "_BackendRendezvousStateHolder"):
        monkeypatch.setattr(dynamic_rendezvous, name, getattr(dynamic_rendezvous, name))
    monkeypatch.setattr(dynamic_rendezvous, "datetime", SetBack)
    watch_locally()
    state, sent = Shared("a").state, []
    state.last_heartbeats["a"] = dynamic_rendezvous.datetime.now(UTC)
    for _ in range(30):
        seen = dynamic_rendezvous._RendezvousContext("a", state, SETTINGS)
        if dynamic_rendezvous._should_keep_alive(seen):
            state.last_heartbeats["a"] = dynamic_rendezvous.datetime.now(UTC)
            sent.append(clock.now)
        clock.now += 5
        if len(sent) == 2:
            SetBack.by = timedelta(hours=1)
    assert len(sent) > 10
    assert type(state.last_heartbeats["a"]) is datetime  # Other nodes have to unpickle it.


def test_a_record_of_the_rendezvous_costs_no_walk_through_the_stack(monkeypatch):
    """It is taken between reading the state and writing it, where others write in between."""
    for name in ("_BackendRendezvousStateHolder", "datetime", "get_method_name"):
        monkeypatch.setattr(dynamic_rendezvous, name, getattr(dynamic_rendezvous, name))
    watch_locally()

    def walk(*_):
        raise AssertionError("walked")

    monkeypatch.setattr(dynamic_rendezvous.inspect, "stack", walk)
    names = []
    monkeypatch.setattr(
        dynamic_rendezvous, "construct_and_record_rdzv_event", lambda name, **_: names.append(name)
    )
    watch = LocalWatch(Shared("ab"), SETTINGS)
    node = dynamic_rendezvous._NodeDesc("c", 1, 0)
    executor = dynamic_rendezvous._DistributedRendezvousOpExecutor(node, watch, SETTINGS)
    executor._state = watch.state
    executor._add_to_wait_list()
    kind = "_DistributedRendezvousOpExecutor"
    assert names == [f"{kind}._add_to_wait_list", f"{kind}._keep_alive"]
    assert watch.state.wait_list == {node}


class SetBack(datetime):
    """A wall clock that can be set back."""

    by = timedelta(0)

    @classmethod
    def now(cls, tz=None):
        return datetime.fromtimestamp(time.monotonic(), tz) - cls.by


SKEWED = """
import os, sys
from datetime import datetime, timedelta
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, dynamic_rendezvous
from titan_dit.launcher import launch, store

skew = timedelta(seconds=float(os.environ['SKEW']))

class Skewed(datetime):
    @classmethod
    def now(cls, tz=None):
        return datetime.now(tz) + skew

dynamic_rendezvous.datetime = Skewed
store.SteadyClock.wall += skew
sys.exit(launch.main())
"""


@pytest.mark.alone
def test_a_skewed_and_stalled_launcher_is_lost_only_once_it_is_silent_for_long(tmp_path):
    (tmp_path / "skewed.py").write_text(SKEWED)
    (tmp_path / "rank.py").write_text("import time\ntime.sleep(600)\n")
    endpoint = f"127.0.0.1:{free_port()}"
    meeting = ["--nnodes", "1:2", "--rdzv-backend", "c10d", "--nproc-per-node", 1]
    meeting += ["--rdzv-endpoint", endpoint, "--rdzv-conf"]
    meeting += ["last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=6"]
    command = [sys.executable, tmp_path / "skewed.py", *meeting, tmp_path / "rank.py"]
    with Running(command, tmp_path, "first", SKEW=0) as first:
        first.wait_until(lambda: is_open(endpoint))  # It holds the store, and is not stalled.
        with Running(command, tmp_path, "second", SKEW=-3600) as second:
            lose_after_a_long_stall(first, second)


def lose_after_a_long_stall(first, second):
    first.wait_for("2 ranks on 2 nodes")
    second.wait_for("2 ranks on 2 nodes")
    time.sleep(7)
    stall(second, 2)
    time.sleep(2)
    assert "was lost" not in first.said + second.said
    stall(second, 10)
    first.wait_for("a node was lost")


def stall(launcher, seconds):
    os.kill(launcher.process.pid, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(launcher.process.pid, signal.SIGCONT)


def test_what_could_not_be_written_is_forgotten_and_a_store_that_stays_gone_is_an_error(clock):
    shared = Shared("ab")
    watch = LocalWatch(shared, SETTINGS)
    watch.sync()
    store = LastingStore.__new__(LastingStore)
    store.lost, store.is_needed, store.is_refused = clock.now, True, False
    shared._store = store

    def fail(*_):
        raise RendezvousConnectionError

    shared.set_state = shared.get_state = fail
    watch.state.participants["c"] = 2
    watch.mark_dirty()
    assert watch.sync() is False
    assert set(watch.state.participants) == {"a", "b"}
    clock.now += 1000
    with pytest.raises(RendezvousConnectionError):
        watch.sync()
