"""Two launchers, as on two nodes: one is lost, rejoins, and both stop together."""

import os
import re
import signal
from types import SimpleNamespace

import pytest
from commands import metrics
from running import QUICK, Running, checkpoints, free_port, is_open, launcher
from torch.distributed import HashStore
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import RendezvousClosedError

from titan_dit.launcher.agent import STOPPED, Agent, EndedElsewhere, Stopped

pytestmark = pytest.mark.alone

TRAIN = ("-m", "titan_dit.train", "--config", "digits", *QUICK)
TRAIN += ("--training.steps", 100_000, "--checkpoint.every", 25)
TIMING = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=4"
"""A node is lost after 4 s; the defaults take longer."""


def node(endpoint, nodes, *words, restarts=0, timing=TIMING, address="127.0.0.1"):
    """The command of a launcher with one rank, `words`.

    Rank 0 is on the node with the first address in alphabetical order; of equal ones on that
    whose launcher has the lowest pid, which may be either.
    """
    command = launcher(*words, ranks=1, restarts=restarts)
    meeting = ["--nnodes", nodes, "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
    meeting += ["--rdzv-conf", timing, "--local-addr", address]
    at = command.index("--standalone")
    command[at : at + 1] = meeting
    return command


def elastic(folder, body, nodes, restarts=0):
    """A launcher command around a script of one rank, and its rendezvous endpoint."""
    script = folder / "script.py"
    script.write_text(
        "import os, signal, time\nfrom titan_dit.ranks import failure\n"
        f"print('is restart:', failure.is_restarted(), flush=True)\n{body}"
    )
    endpoint = f"127.0.0.1:{free_port()}"
    return node(endpoint, nodes, script, restarts=restarts), endpoint


# Scripts of ranks that are asked to restart with another node.
SAVING = """
def save(number, frame):
    print('saving', flush=True)
    while not os.path.exists('saved'):
        time.sleep(0.05)
    failure.leave_note({'stopped': 'REGROUP', 'step': 1})
    os._exit(0)
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
signal.signal(signal.SIGUSR2, save)
time.sleep(600)
"""
FAILING = """
def main():
    signal.signal(signal.SIGUSR2, fail)
    time.sleep(600)
def fail(number, frame):
    raise RuntimeError('planted')
failure.run_and_exit(main)
"""


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_rank_that_fails_to_save_for_another_node_is_told_and_counts(restarts, tmp_path):
    command, endpoint = elastic(tmp_path, FAILING, "1:2", restarts)
    with Running(command, tmp_path, "first") as first:
        first.wait_until(lambda: is_open(endpoint))
        first.wait_for("is restart: False")
        with Running(command, tmp_path, "second") as second:
            first.wait_for("RuntimeError: planted")
            if not restarts:
                assert first.end() == 1
                return
            first.wait_for("2 ranks on 2 nodes")
            first.wait_for("is restart: True")
            # A node that joins late knows it, too.
            second.wait_for("is restart: True")
            assert "is restart: False" not in second.said
    assert first.said.count("Traceback") == 1
    assert "restart 1, 0 left" in first.said


def test_a_stop_while_the_ranks_save_for_another_node_is_a_stop_on_all_nodes(tmp_path):
    command, endpoint = elastic(tmp_path, SAVING, "2:3")
    with Running(command, tmp_path, "first", STOPPED_CODE=75) as first:
        first.wait_until(lambda: is_open(endpoint))
        with Running(command, tmp_path, "second", STOPPED_CODE=75) as second:
            first.wait_for("2 ranks on 2 nodes")
            second.wait_for("is restart")
            with Running(command, tmp_path, "third"):
                first.wait_for("saving")
                second.wait_for("saving")
                first.send(signal.SIGTERM)
                first.wait_for("SIGTERM: the ranks finish")
                (tmp_path / "saved").touch()
                assert first.end() == 75, first.said
                assert second.end() == 75, second.said
    assert "another node has ended the job" in second.said
    assert "restarted" not in first.said + second.said


def test_ranks_that_wait_for_a_lost_node_begin_again_without_it(tmp_path):
    """Like ranks blocked in an NCCL collective: they do not notice the loss."""
    command, endpoint = elastic(tmp_path, "time.sleep(600)\n", "1:2")
    with Running(command, tmp_path, "first") as first:
        first.wait_until(lambda: is_open(endpoint))
        with Running(command, tmp_path, "second") as second:
            first.wait_for("2 ranks on 2 nodes")
            second.wait_for("2 ranks on 2 nodes")
        first.wait_for("a node was lost")
        first.wait_for("restarted: 1 ranks on one node")
        first.wait_for("is restart: True")  # A forked rank ignores signals until it runs.
        first.send(signal.SIGUSR1)
        assert first.end(20) == 0


DYING = """
import os, signal, sys
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from titan_dit.launcher import launch
DynamicRendezvousHandler._get_world = lambda _: os.kill(os.getpid(), signal.SIGKILL)
sys.exit(launch.main())
"""


def test_a_node_that_is_lost_before_its_ranks_start_is_done_without(tmp_path):
    """The others wait for its part in the store of the rendezvous, up to read_timeout."""
    script, dying = tmp_path / "script.py", tmp_path / "dying.py"
    script.write_text("print('running', flush=True)\nimport time\ntime.sleep(600)\n")
    dying.write_text(DYING)
    endpoint = f"127.0.0.1:{free_port()}"
    command = node(endpoint, "1:2", script, timing=f"{TIMING},read_timeout=4")
    module = command.index("titan_dit.launcher.launch")
    lost = [*command[: module - 1], dying, *command[module + 1 :]]
    with Running(command, tmp_path, "first") as first:
        first.wait_for("running")
        with Running(lost, tmp_path, "second") as second:
            second.wait_until(lambda: second.process.poll() is not None)
            first.wait_for("a node was lost before its ranks started")
            first.wait_for("restarted: 1 ranks on one node")
            first.wait_for("running", times=2)
    assert "Traceback" not in first.said


ADDRESSES = ("127.0.0.1", "localhost")


@pytest.mark.parametrize(
    "addresses", [ADDRESSES, ADDRESSES[::-1]], ids=["rank 0 stays", "rank 0 on the other node"]
)
def test_a_lost_node_is_done_without_and_taken_back_and_all_stop_together(addresses, tmp_path):
    endpoint = f"127.0.0.1:{free_port()}"
    here, there = (
        node(endpoint, "1:2", *TRAIN, restarts=10, address=address) for address in addresses
    )
    with Running(here, tmp_path, "first") as first:
        # The first node hosts the rendezvous and must not be lost.
        first.wait_until(lambda: is_open(endpoint))
        with Running(there, tmp_path, "second") as second:
            with_rank_0 = first if addresses == ADDRESSES else second
            with_rank_0.wait_for("dp_shard 2 on cpu")
            with_rank_0.wait_for_step(30)
            for pid in (*second.children(), second.process.pid):
                os.kill(pid, signal.SIGKILL)
        first.wait_for("1 ranks on one node")
        assert "another rank was lost" in first.said
        assert "restart 1, 9 left" in first.said  # Ranks that fail count, whatever the cause.
        assert "Traceback" not in first.said
        first.wait_for("one rank on cpu")
        alone_from = first.step
        first.wait_until(lambda: first.step > alone_from + 2)

        with Running(there, tmp_path, "third") as third:
            with_rank_0, other = (first, third) if addresses == ADDRESSES else (third, first)
            first.wait_for("another node is waiting")
            first.wait_for("2 ranks on 2 nodes", times=2)
            other.wait_for(f"2 ranks on 2 nodes; rank 0 prints on another node ({min(addresses)})")
            with_rank_0.wait_for("dp_shard 2 on cpu", times=2 if first is with_rank_0 else 1)
            told = with_rank_0.said.count("\nstep ")
            with_rank_0.wait_until(lambda: with_rank_0.said.count("\nstep ") > told + 3)
            third.send(signal.SIGTERM)
            assert third.end() == 0, third.said
            assert first.end() == 0, first.said
            assert "Traceback" not in first.said + third.said
    # No step was lost when the node joined: the run continued after the last step.
    stops = re.findall(r"stopped after step (\d+);", first.said + third.said)
    resumed = re.findall(r"resumed from outputs/digits/checkpoints/step-0*(\d+)", with_rank_0.said)
    assert stops[-2] == resumed[-1]
    rows = [row["step"] for row in metrics(tmp_path / "outputs" / "digits")]
    assert rows == list(range(1, with_rank_0.step + 1))
    assert with_rank_0.step in checkpoints(tmp_path)


SIGNALS = """
def main():
    if os.environ['RANK'] == '1':
        while not os.path.exists('listening'):
            time.sleep(0.05)
        raise RuntimeError('planted')
    signal.signal(signal.SIGUSR2, lambda *_: os.write(1, b'asked to restart\\n'))
    signal.signal(signal.SIGTERM, end)
    open('listening', 'w').close()
    while True:
        time.sleep(0.05)
def end(number, frame):
    os.write(1, b'ended\\n')
    os._exit(0)
failure.run_and_exit(main)
"""


def test_the_other_ranks_of_a_failed_one_hear_that_they_restart_before_sigterm(tmp_path):
    """They would take SIGTERM alone for a request to end the job."""
    script = tmp_path / "script.py"
    head = "import os, signal, time\nfrom titan_dit.ranks import failure\n"
    script.write_text(head + SIGNALS)
    with Running(launcher(script), tmp_path) as launched:
        assert launched.end() == 1
    assert launched.said.index("asked to restart") < launched.said.index("ended\n")


def agent_of_two_nodes(monkeypatch):
    """An agent without ranks whose job another node has ended, and its worker group."""
    agent = Agent.__new__(Agent)
    agent.is_stopping, agent.say, agent._pcontext = False, print, None

    def closed(*_):
        raise RendezvousClosedError

    monkeypatch.setattr(LocalElasticAgent, "_restart_workers", closed)
    state = SimpleNamespace(participants={"a": 0, "b": 1})
    handler = SimpleNamespace(
        _store=HashStore(),
        _state_holder=SimpleNamespace(state=state),
        _this_node="b",
        get_run_id=lambda: "run",
    )
    spec = SimpleNamespace(rdzv_handler=handler)
    return agent, SimpleNamespace(spec=spec, group_world_size=2)


def test_a_job_that_another_node_has_ended_is_a_success_only_if_that_one_says_so(monkeypatch):
    agent, group = agent_of_two_nodes(monkeypatch)
    with pytest.raises(EndedElsewhere):
        agent.rejoin(group)
    agent.note_end(group, STOPPED)
    with pytest.raises(Stopped):
        agent.rejoin(group)


def test_a_node_that_the_others_have_replaced_is_lost(monkeypatch):
    agent, group = agent_of_two_nodes(monkeypatch)
    state = group.spec.rdzv_handler._state_holder.state
    assert not agent.has_lost_node(group)
    state.participants = {"a": 0, "c": 1}
    assert agent.has_lost_node(group)
    state.participants = {"b": 1}
    assert agent.has_lost_node(group)
