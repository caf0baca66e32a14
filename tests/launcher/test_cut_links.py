"""Two hosts whose link is cut: the run goes on within seconds, and no sample is lost."""

import random
import time

import pytest
from hosts import Network, needs_hosts
from pair import FLAGS, Pair, chaos_account, nothing_lost
from running import undisturbed_run

pytestmark = [needs_hosts, pytest.mark.alone]

DETECTED_S = 12.0
BACK_S = 10.0
"""From the return of the link, or from the detection if that is later, to a step of both hosts."""
LENGTHS = (2, 12, 15, 20, 25, 30, 40)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Runs without faults, on two ranks of one host: steps -> run directory."""
    runs = {}

    def of(*flags):
        if flags not in runs:
            folder = tmp_path_factory.mktemp("undisturbed")
            runs[flags] = undisturbed_run(folder, "--config", "digits", *FLAGS, *flags)
        return runs[flags]

    return of


def wait_for_phase(pair, phase, rng):
    """Wait for a step, or a save; or for a rendezvous, after a rank of host b was killed."""
    pair.wait_for_steps(3)
    if phase == "step":
        time.sleep(rng.uniform(0, 0.3))
    elif phase == "save":
        pair.in_a_save()
    else:
        b = pair.net.hosts[1]
        times = pair[b].said.count("rank 1 ended")
        kill_rank(b)
        pair.wait(lambda: pair[b].said.count("rank 1 ended") > times)
        time.sleep(rng.uniform(0, 1))


def kill_rank(host):
    """SIGKILL to the rank of a host, which its fork server has forked."""
    script = "kill -9 $(pgrep -P $(pgrep -f launcher.fork_server | head -n 1))"
    host.space.run("sh", "-c", script)


def cut(pair, seconds, how):
    """Cut the link for a time; return the seconds from its return, or its detection, to a step."""
    a, b = pair.net
    if how == "unplugged":
        pair.net.unplug(b)
    else:
        pair.net.cut(*((a, b) if how == "a to b" else (b, a)), one_way=how != "both ways")
    began = time.monotonic()
    time.sleep(seconds)
    pair.net.restore()
    pair.net.plug(b)
    due = max(0.0, DETECTED_S - (time.monotonic() - began))
    return pair.wait_for_steps(1) - due


@pytest.mark.long
@pytest.mark.parametrize("phase", ["step", "save", "rendezvous"])
def test_a_cut_of_any_length_costs_seconds_and_no_sample(phase, tmp_path, undisturbed):
    rng, steps = random.Random(phase), 2000
    flags = ("--training.steps", steps, "--checkpoint.every", 100)
    took = {}
    with Network(tmp_path) as net, Pair(net, tmp_path, *flags, MAX_RESTARTS=30) as pair:
        for seconds in rng.sample(LENGTHS, len(LENGTHS)):
            wait_for_phase(pair, phase, rng)
            before = pair.restarts()
            took[seconds] = round(cut(pair, seconds, "both ways"), 1)
            if seconds < 10 and phase != "rendezvous":
                assert pair.restarts() == before
        print(phase, took)
        assert pair.end() == {"a": 0, "b": 0}, pair.said
    nothing_lost(pair.output, steps)
    assert chaos_account().same_bits(pair.output, undisturbed(*flags))[0]
    assert max(took.values()) <= BACK_S, took


@pytest.mark.long
@pytest.mark.parametrize("how", ["a to b", "b to a", "unplugged"])
def test_a_link_that_is_cut_one_way_or_unplugged_is_a_cut(how, tmp_path):
    steps, took = 1000, {}
    flags = ("--training.steps", steps, "--checkpoint.every", 100)
    with Network(tmp_path) as net, Pair(net, tmp_path, *flags, MAX_RESTARTS=30) as pair:
        for seconds in (5, 25):
            pair.wait_for_steps(3)
            took[seconds] = round(cut(pair, seconds, how), 1)
        print(how, took)
        assert pair.end() == {"a": 0, "b": 0}, pair.said
    nothing_lost(pair.output, steps)
    assert max(took.values()) <= BACK_S, took


def test_a_short_cut_costs_no_restart(tmp_path):
    with Network(tmp_path) as net:
        flags = ("--training.steps", 60, "--checkpoint.every", 50)
        with Pair(net, tmp_path, *flags, MAX_RESTARTS=0) as pair:
            pair.wait_for_steps(3)
            assert cut(pair, 2, "both ways") + DETECTED_S - 2 < BACK_S
            assert pair.end() == {"a": 0, "b": 0}, pair.said
            assert pair.restarts() == 0
    nothing_lost(pair.output, 60)


@pytest.mark.long
def test_thirty_drawn_faults_lose_no_sample(tmp_path, undisturbed):
    rng = random.Random(41)
    steps, took = 2000, []
    flags = ("--training.steps", steps, "--checkpoint.every", 10)
    with Network(tmp_path) as net, Pair(net, tmp_path, *flags, MAX_RESTARTS=40) as pair:
        a, b = net
        for number in range(30):
            pair.wait_for_steps(rng.randint(2, 40))
            what = rng.choice(["cut", "a to b", "b to a", "unplugged", "stall", "rank", "host"])
            seconds = rng.choice([1, 3, 6, 11, 13, 16, 22])
            if what == "stall":
                host = rng.choice([a, b])
                host.stall()
                time.sleep(seconds)
                host.wake()
                took.append((what, seconds, pair.wait_for_steps(1)))
            elif what == "rank":
                kill_rank(rng.choice([a, b]))
                took.append((what, 0, pair.wait_for_steps(1)))
            elif what == "host":
                b.kill()
                b.boot()
                pair.start(b)
                took.append((what, 0, pair.wait_for_steps(1)))
            else:
                took.append((what, seconds, cut(pair, seconds, what)))
            print(number, took[-1], pair.step(), flush=True)
        assert pair.end() == {"a": 0, "b": 0}, pair.said
    nothing_lost(pair.output, steps)
    assert chaos_account().same_bits(pair.output, undisturbed(*flags))[0]
    slow = [each for each in took if each[0] != "host" and each[2] > BACK_S]
    assert not slow, slow
