"""A healthy node stays in the rendezvous, whatever its clock says; a silent one is lost."""

import os
import pickle
import signal
import sys
import time
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from running import Running, free_port, is_open
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from titan_dit.launcher import heartbeats
from titan_dit.launcher.heartbeats import LocalWatch

SETTINGS = SimpleNamespace(
    keep_alive_interval=timedelta(seconds=10), keep_alive_max_attempt=3, min_nodes=1, run_id="run"
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
    monkeypatch.setattr(heartbeats.time, "monotonic", lambda: clock.now)

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


SKEWED = """
import datetime, os, sys, time
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from titan_dit.launcher import launch

class Skewed(datetime.datetime):
    @classmethod
    def now(cls, zone=None):
        return super().now(zone) + datetime.timedelta(seconds=float(os.environ['SKEW']))

dynamic_rendezvous.datetime = Skewed
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
