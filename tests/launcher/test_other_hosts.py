"""Two hosts that do not fit together are refused in one line; lost hosts and disks are survived."""

import contextlib
import shutil
import signal
import time

import pytest
from commands import ROOT
from hosts import Network, compiler, needs_hosts
from pair import Pair, nothing_lost
from test_cut_links import BACK_S, DETECTED_S, cut

pytestmark = [needs_hosts, pytest.mark.alone, pytest.mark.long]

LAST_CALL_S, START_S = 3.0, 5.0


def started_apart(net, folder, *more, **variables):
    """Start host b's launcher with other flags or variables; returns both, at their ends."""
    pair = Pair(net, folder, "--training.steps", 100_000, MAX_RESTARTS=0)
    a, b = net
    pair.start(a)
    pair[a].wait_for("rendezvous of")
    time.sleep(3)
    pair.start(b, *more, **variables)
    return pair


def test_another_config_is_refused_by_its_first_difference(tmp_path):
    with Network(tmp_path) as net:
        pair = started_apart(net, tmp_path, "--checkpoint.every", 7)
        assert set(pair.end().values()) == {2}
        assert "[checkpoint] every=100 on rank 0, but 7 on rank 1. Launch" in pair.said
        assert "step " not in pair[net.hosts[0]].said


def test_other_code_another_torch_or_number_of_nodes_is_refused(tmp_path):
    code = tmp_path / "other"
    shutil.copytree(ROOT / "titan_dit", code / "titan_dit")
    with (code / "titan_dit" / "rng.py").open("a") as file:
        file.write("# another line\n")
    other_torch = tmp_path / "torch" / "torch-2.12.0.dist-info"
    other_torch.mkdir(parents=True)
    (other_torch / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.12.0\n")
    cases = {
        "the files of titan_dit differs": {"PYTHONPATH": code},
        "torch differs between the hosts of this run: 2.12.0": {
            "PYTHONPATH": f"{other_torch.parent}:{ROOT}"
        },
    }
    with Network(tmp_path) as net, contextlib.ExitStack() as stack:
        _, b = net
        pair = started_apart(net, tmp_path, NNODES=3)
        stack.push(pair.__exit__)
        cases["NNODES differs between the hosts of this run: 3 here, and 2"] = {"NNODES": 3}
        for words, variables in cases.items():
            started = pair.start(b, **variables)
            assert started.end(60) == 2, pair.said
            assert words in started.said
            assert "Traceback" not in started.said
        pair.start(b, RDZV_ID="other")
        pair[b].wait_for("RDZV_ID=other, but the first launcher at this RDZV_ENDPOINT has titan")
        pair[b].send(signal.SIGTERM)
        pair[b].end(60)
        # The first launcher has waited unharmed.
        pair.start(b)
        pair.wait_for_steps(3)


@pytest.mark.parametrize("nodes", ["2", "1:2"])
def test_a_host_that_is_killed_comes_back(nodes, tmp_path):
    steps = 1500
    flags = ("--training.steps", steps, "--checkpoint.every", 20)
    with Network(tmp_path) as net, Pair(net, tmp_path, *flags, NNODES=nodes) as pair:
        a, b = net
        pair.wait_for_steps(10)
        b.kill()
        if nodes == "1:2":
            took = pair.wait_for_steps(1, ranks=[0])
            print("from the kill to a step of the other host:", round(took, 1))
            assert took < DETECTED_S + LAST_CALL_S + START_S
            assert "1 ranks on one node" in pair[a].said
        else:
            time.sleep(20)
        b.boot()
        pair.start(b)
        print("from the start to a step of both:", round(pair.wait_for_steps(1), 1))
        assert pair.end() == {"a": 0, "b": 0}, pair.said
    nothing_lost(pair.output, steps)


def test_the_host_of_the_rendezvous_is_killed_and_the_other_one_says_so(tmp_path):
    steps = 600
    flags = ("--training.steps", steps, "--checkpoint.every", 20)
    with Network(tmp_path) as net, Pair(net, tmp_path, *flags) as pair:
        a, b = net
        pair.wait_for_steps(10)
        pair[a].process.kill()
        a.space.run("sh", "-c", "kill -9 $(pgrep -f 'launcher.(launch|fork_server)')")
        assert pair[b].end(60) == 1, pair.said
        assert "rendezvous" in pair[b].said
        pair.start(a)
        pair.start(b)
        pair.wait_for_steps(1)
        assert pair.end() == {"a": 0, "b": 0}, pair.said
    nothing_lost(pair.output, steps)


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_host_that_stalls_for_20_s_goes_on(name, tmp_path):
    steps = 600
    flags = ("--training.steps", steps, "--checkpoint.every", 50)
    with Network(tmp_path) as net, Pair(net, tmp_path, *flags) as pair:
        [host] = [each for each in net if each.name == name]
        pair.wait_for_steps(10)
        host.stall()
        time.sleep(20)
        host.wake()
        took = pair.wait_for_steps(1)
        print("from the wake to a step of both:", round(took, 1))
        assert took <= BACK_S
        assert pair.end() == {"a": 0, "b": 0}, pair.said
    nothing_lost(pair.output, steps)


def test_a_disk_that_disappears_from_one_host_comes_back(tmp_path):
    steps = 600
    flags = ("--training.steps", steps, "--checkpoint.every", 50)
    with Network(tmp_path) as net, Pair(net, tmp_path, *flags) as pair:
        _, b = net
        pair.wait_for_steps(10)
        b.hide(tmp_path / "outputs")
        pair.wait(lambda: "was not saved" in pair.said)
        b.show(tmp_path / "outputs")
        assert pair.end() == {"a": 0, "b": 0}, pair.said
    nothing_lost(pair.output, steps)


def test_hosts_whose_clocks_differ_train_together(tmp_path):
    steps, clocks = 300, {"boot_s": 50_000} | ({"ahead_s": 7200} if compiler() else {})
    flags = ("--training.steps", steps, "--checkpoint.every", 50)
    with Network(tmp_path, 2, b=clocks) as net, Pair(net, tmp_path, *flags) as pair:
        pair.wait_for_steps(10)
        assert cut(pair, 16, "both ways") <= BACK_S
        assert pair.end() == {"a": 0, "b": 0}, pair.said
        assert pair.restarts() == 1
    nothing_lost(pair.output, steps)
