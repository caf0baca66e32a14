"""Which failure is the cause, what is reported and counted, and the pause before a restart."""

import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import records
import torch
from running import Running, free_port, is_open, launcher
from test_agents import SAVING, node
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from titan_dit.checkpoint.run_checkpoints import Checkpoints
from titan_dit.config.operation import CheckpointConfig
from titan_dit.launcher import agent as agents
from titan_dit.launcher import launch
from titan_dit.launcher.agent import Agent
from titan_dit.launcher.cause import root_cause, without_killed
from titan_dit.ranks.failure import SAVED

pytestmark = pytest.mark.alone

HEAD = "import os, signal, time\nfrom titan_dit.ranks import failure\n"


def failure_of(exitcode, message="", local_rank=0, *, is_user=False, trained=True):
    failed = ProcessFailure(local_rank, 1, exitcode, "")
    if message:
        details = {"moment": 1.0, "user": is_user, "trained": trained}
        failed.message = {"message": message, "extraInfo": details}
    return failed


# torchrun waits 30 s before it kills.
KILLED_SOON = """
import sys
from titan_dit.launcher import agent, launch
agent.KILLS_AFTER_S = 1
sys.exit(launch.main())
"""
BLOCKED = """
def main():
    if os.environ['RANK'] == '1':
        while not os.path.exists('deaf'):
            time.sleep(0.05)
        raise RuntimeError('planted')
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    open('deaf', 'w').close()
    time.sleep(600)
failure.run_and_exit(main)
"""


def test_a_rank_that_torchrun_had_to_kill_is_not_the_cause(tmp_path):
    """A rank that is blocked in an NCCL collective may not end within torchrun's 30 s."""
    script, soon = tmp_path / "script.py", tmp_path / "soon.py"
    script.write_text(HEAD + BLOCKED)
    soon.write_text(KILLED_SOON)
    command = launcher(script)
    module = command.index("titan_dit.launcher.launch")
    with Running([*command[: module - 1], soon, *command[module + 1 :]], tmp_path) as launched:
        assert launched.end() == 1, launched.said
    assert "RuntimeError: planted" in launched.said
    assert "exit code -9" not in launched.said


def test_a_sigkill_from_outside_stays_the_cause():
    failures = {4: failure_of(1, "planted"), 5: failure_of(-9, local_rank=1)}
    assert root_cause(without_killed(failures, closed={2}))[0] == 5
    assert root_cause(without_killed(failures, closed={1}))[0] == 4


NOTED = """
failure.leave_note({'stopped': 'REGROUP' if failure.is_restarted() else 'STOP', 'step': 1})
if not failure.is_restarted():
    os.kill(os.getpid(), signal.SIGKILL)
failure.leave_note({'stopped': 'STOP', 'step': 1})
"""


def test_a_rank_that_is_killed_after_its_note_about_a_stop_is_restarted(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(HEAD + NOTED)
    command = launcher(script, ranks=1, restarts=1)
    with Running(command, tmp_path, STOPPED_CODE=75) as launched:
        assert launched.end() == 75, launched.said
    assert "rank 0 ended with exit code -9" in launched.said
    assert "restart 1, 0 left" in launched.said
    assert "Traceback" not in launched.said


def agent_of(*, waiting=0, starts=1, restarts=3):
    """An agent without ranks, and what it says."""
    agent, said = Agent.__new__(Agent), []
    agent.say, agent.starts, agent.is_stopping, agent.pause_s = said.append, starts, False, 0.0
    agent._remaining_restarts, agent._pcontext, agent.credited = restarts, None, -1
    handler = SimpleNamespace(num_nodes_waiting=lambda: waiting)
    spec = SimpleNamespace(rdzv_handler=handler, max_restarts=restarts)
    agent._worker_group = SimpleNamespace(spec=spec)
    return agent, said


LOST = "Connection closed by peer [10.0.0.2]"


@pytest.mark.parametrize(
    ("cause", "is_own"),
    [
        (failure_of(1, "Traceback\nRuntimeError: planted"), True),
        (failure_of(-9), True),
        (failure_of(1, LOST), False),
        (failure_of(-6), False),
    ],
    ids=["raised", "killed", "lost a peer", "aborted by NCCL"],
)
def test_a_node_that_others_wait_for_reports_a_failure_of_its_own(cause, is_own):
    """Their ranks may have failed because of it, and be faster."""
    agent, said = agent_of(waiting=1)
    agent.count_and_report({0: cause}, is_regrouping=False)
    assert agent._remaining_restarts == (3 if is_own else 4)
    # An abort may be of its own: it is shown, though not counted.
    assert len(said) == (is_own or cause.exitcode == -signal.SIGABRT)


def test_restarts_pause_longer_and_longer_while_ranks_fail_before_they_train():
    agent, said = agent_of()
    early, late = failure_of(1, "error: disk", trained=False), failure_of(1, "error: disk")
    pauses = []
    for starts, cause in ((1, early), (2, early), (3, early), (9, early), (10, late)):
        agent.starts = starts
        agent.count_and_report({0: cause}, is_regrouping=False)
        pauses.append(agent.pause_s)
    assert pauses == [0, 2, 4, 8, 0]
    assert "restart 1 in 2 s, 2 left." in said[1]
    agent.pause_s, agent.starts = agents.PAUSE_S, 20
    agent.count_and_report({0: early}, is_regrouping=False)
    assert agent.pause_s == agents.PAUSE_S


@pytest.mark.parametrize("why", ["asked to stop", "closed elsewhere"])
def test_a_pause_ends_with_the_job(why):
    agent, _ = agent_of()
    agent.pause_s, state = 600.0, SimpleNamespace(closed=False)
    agent._worker_group.spec.rdzv_handler._state_holder = SimpleNamespace(state=state)
    paused = threading.Thread(target=agent.pause, daemon=True)
    paused.start()
    paused.join(0.1)
    assert paused.is_alive()
    agent.is_stopping, state.closed = why == "asked to stop", why == "closed elsewhere"
    paused.join(10)
    assert not paused.is_alive()


def test_a_checkpoint_gives_all_restarts_back(tmp_path):
    agent, said = agent_of(restarts=10)
    agent._remaining_restarts = 0
    file = tmp_path / "error.json"
    agent._pcontext = SimpleNamespace(error_files={0: str(file)})
    cause = failure_of(1, "Traceback\nRuntimeError: planted")
    agent.credit()
    agent.count_and_report({0: cause}, is_regrouping=False)
    assert (agent._remaining_restarts, said) == (0, [])
    assert agent.has_failed
    Path(f"{file}{SAVED}").write_text("7")
    agent.credit()
    agent.count_and_report({0: cause}, is_regrouping=False)
    assert agent._remaining_restarts == 10
    assert not agent.has_failed
    assert "restart 1, 9 left." in said[0]
    # The same step again is no progress: what it saves may be damaged each time.
    agent._remaining_restarts = 3
    agent.credit()
    assert agent._remaining_restarts == 3
    agent.count_and_report({0: failure_of(2, "error: tp=3", is_user=True)}, is_regrouping=False)
    assert agent._remaining_restarts == 0


def test_a_rank_shows_that_it_has_saved(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    saves = Checkpoints(tmp_path / "checkpoints", CheckpointConfig(async_save=False))
    saves.save(3, {"model": {"w": torch.ones(1)}}, records.of_run(3))
    assert (tmp_path / f"error.json{SAVED}").read_text() == "3"


FAILS_LATER = """
def main():
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    while not os.path.exists('fail'):
        time.sleep(0.05)
    raise RuntimeError('planted')
failure.run_and_exit(main)
"""


def test_a_stop_of_a_node_that_waits_for_the_others_to_restart_ends_them_too(tmp_path):
    endpoint = f"127.0.0.1:{free_port()}"
    saving, failing = tmp_path / "saving.py", tmp_path / "failing.py"
    saving.write_text(HEAD + SAVING)
    failing.write_text(HEAD + FAILS_LATER)
    variables = {"STOPPED_CODE": 75}
    with Running(node(endpoint, "2", saving), tmp_path, "first", **variables) as first:
        first.wait_until(lambda: is_open(endpoint))
        command = node(endpoint, "2", failing, restarts=1)
        with Running(command, tmp_path, "second", **variables) as second:
            second.wait_for("2 ranks on 2 nodes")
            first.wait_for("2 ranks on 2 nodes")
            (tmp_path / "fail").touch()
            second.wait_for("restart 1, 0 left")
            first.wait_for("saving")
            second.send(signal.SIGTERM)
            assert second.end() == 75, second.said
            (tmp_path / "saved").touch()
            assert first.end() == 75, first.said
    assert "another node has ended the job" in first.said


def test_closing_a_rendezvous_between_ranks_takes_seconds_at_most(monkeypatch):
    agent, _ = agent_of()
    agent._worker_group.group_world_size = 1
    monkeypatch.setattr(agents, "CLOSING_S", 0.1)
    monkeypatch.setattr(agent, "close_rendezvous", threading.Event().wait)
    agent.end_job()


def test_a_stop_of_a_job_that_has_failed_makes_it_no_success():
    launcher = launch.Launcher(1.0, stopped_code=0)
    launcher.agent = agent_of()[0]
    launcher.agent.has_failed = True
    launcher.hear(signal.SIGTERM)
    assert launcher.asked is None
    launcher.hear(signal.SIGINT)  # A second one ends it at once.
    assert launcher.asked == signal.SIGINT
