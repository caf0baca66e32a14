"""A signal to any rank stops all ranks after the same step."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from commands import environment
from harness import on_ranks

from titan_dit.optim.gradient_norm import clip_norm
from titan_dit.ranks import stop_request
from titan_dit.ranks.failure import LEFT
from titan_dit.ranks.signals import Listener
from titan_dit.ranks.stop_request import DIGIT, Reason, StopRequest, reason_of

pytestmark = pytest.mark.alone

CPU = torch.device("cpu")

CASES = (
    (0, 5, signal.SIGTERM, (5, Reason.STOP)),
    (1, 5, signal.SIGTERM, (6, Reason.STOP)),
    (1, 7, signal.SIGUSR2, (8, Reason.REGROUP)),
    (0, 0, signal.SIGTERM, (50, Reason.NONE)),
)
"""Steps until the sum is read, the step of the signal, the signal; the last step, the reason."""


def all_cases(world):
    return [steps_until_agreed(world, *case) for *case, _ in CASES]


def steps_until_agreed(world, lag, asked_at, number):
    """Steps of NaN gradients, which must not hide the flag."""
    steps = 0
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([torch.nan, 1.0])
    with StopRequest(world.size, CPU) as stop:
        stop.lag = lag
        while steps < 50 and not stop.agreed():
            steps += 1
            if world.rank == world.size - 1 and steps == asked_at:
                os.kill(os.getpid(), number)
                while not stop.asked:
                    time.sleep(0.001)
            assert clip_norm([parameter], 1.0, stop.flag()).isnan()
    return steps, stop.reason


def test_a_signal_to_one_rank_stops_all_ranks_after_the_same_step():
    """The second case is a GPU's, the third has another reason, the last one no signal."""
    assert on_ranks(2, all_cases) == [[expected for *_, expected in CASES]] * 2


def test_the_largest_reason_of_any_number_of_ranks_wins():
    regroup, stop, hook = (float(DIGIT**digit) for digit in range(3))
    assert reason_of(0.0) == Reason.NONE
    most = DIGIT - 1
    assert reason_of(most * regroup) == Reason.REGROUP
    assert reason_of((most - 1) * regroup + stop) == Reason.STOP
    assert reason_of((most - 1) * stop + hook) == Reason.HOOK
    assert most * hook + 1 > most * hook, "fp64 holds every sum exactly"


def test_one_process_stops_after_the_step_in_which_it_was_asked():
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest(1, CPU) as stop:
        assert not stop.agreed()
        os.kill(os.getpid(), signal.SIGTERM)
        while not stop.heard:
            time.sleep(0.001)
        assert stop.agreed()
    assert (stop.by, stop.exit_code) == (" by SIGTERM", 0)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_signal_is_heard_while_the_main_thread_waits_in_c():
    program = (
        "import ctypes, os, signal, threading\n"
        "from titan_dit.ranks.signals import Listener\n"
        "with Listener([signal.SIGUSR1], lambda number: os._exit(7)):\n"
        "    kill = lambda: os.kill(os.getpid(), signal.SIGUSR1)\n"
        "    threading.Timer(0.2, kill).start()\n"
        "    mutex = ctypes.create_string_buffer(64)\n"
        "    for twice in range(2):\n"
        "        ctypes.CDLL(None).pthread_mutex_lock(mutex)\n"
    )
    code = [sys.executable, "-c", program]
    done = subprocess.run(code, env=environment(), timeout=20, check=False)  # Not interruptible.
    assert done.returncode == 7


def test_what_a_forked_child_hears_is_not_for_its_parent():
    """The loader's workers are forked, and torchrun signals whole process groups."""
    heard = []
    with Listener([signal.SIGUSR1], heard.append):
        child = os.fork()
        if child == 0:
            time.sleep(0.3)
            os._exit(0)
        time.sleep(0.1)
        os.kill(child, signal.SIGUSR1)
        _, status = os.waitpid(child, 0)
        assert status == 0, "the child must not die of it either"
        assert heard == []


def test_outside_the_main_thread_signals_are_left_alone():
    before = signal.getsignal(signal.SIGTERM)

    def in_thread():
        with StopRequest(1, CPU) as stop:
            assert not stop.agreed()
            inside.append(signal.getsignal(signal.SIGTERM))

    inside = []
    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()
    assert inside == [before]


def test_a_signal_that_was_ignored_stays_so():
    """A run under nohup continues when the terminal is closed."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest(1, CPU) as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.1)
            assert not stop.agreed()
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("is_stuck", [False, True])
def test_a_rank_is_as_patient_as_its_steps_are_long(is_stuck, monkeypatch):
    left = []
    monkeypatch.setattr(stop_request, "PATIENCE_S", 0.01)
    monkeypatch.setattr(stop_request.os, "_exit", left.append)
    stop = StopRequest(1, CPU)
    stop.agreed()
    time.sleep(0.3)
    stop.agreed()
    thread = threading.Thread(target=stop.leave_if_stuck)
    thread.start()
    time.sleep(0.3)
    assert not left
    if not is_stuck:
        stop.agreed()
    thread.join()
    assert left == [LEFT] * is_stuck


def test_a_sigterm_is_heard_after_what_came_with_it():
    """Both pending, as on a rank that was not scheduled: the kernel's order is another one."""
    heard, both = [], (signal.SIGUSR2, signal.SIGTERM)
    with Listener(both, heard.append):
        signal.pthread_sigmask(signal.SIG_BLOCK, both)
        for number in both:
            os.kill(os.getpid(), number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, both)
        deadline = time.monotonic() + 10
        while len(heard) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert heard == [*both]


@pytest.mark.parametrize(
    ("heard", "leaves"),
    [
        ([signal.SIGTERM], False),
        ([signal.SIGUSR2, signal.SIGTERM], True),
        ([signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM], True),
        ([signal.SIGUSR2, signal.SIGTERM, signal.SIGUSR1], False),
    ],
)
def test_a_rank_that_torchrun_ends_leaves_before_it_is_killed(heard, leaves, monkeypatch):
    """However long its steps are, and though a stop was requested before."""
    left = []
    monkeypatch.setattr(stop_request, "PATIENCE_S", 0.01)
    monkeypatch.setattr(stop_request, "KILLED_S", 0.1)
    monkeypatch.setattr(stop_request.os, "_exit", left.append)
    stop = StopRequest(2, CPU)
    stop.heard, stop.step_s = heard, 100.0
    threading.Thread(target=stop.leave_if_stuck, daemon=True).start()
    time.sleep(0.5)
    stop.boundaries += 1  # A thread that still waits must not end this process later.
    assert left == [LEFT] * leaves


@pytest.mark.parametrize(
    ("heard", "reason"),
    [
        ([signal.SIGTERM], Reason.STOP),
        ([signal.SIGUSR2, signal.SIGTERM], Reason.REGROUP),
        ([signal.SIGTERM, signal.SIGUSR2], Reason.STOP),
        ([signal.SIGUSR2, signal.SIGTERM, signal.SIGUSR1], Reason.STOP),
    ],
)
def test_the_sigterm_of_a_launcher_that_restarts_is_no_request_to_stop(heard, reason):
    stop = StopRequest(2, CPU)
    stop.heard += heard
    assert stop.wanted == reason
