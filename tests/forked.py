"""Processes forked from a server that has imported torch and titan_dit once.

Starting Python and importing torch takes seconds of a core, a fork hundredths. A fork is a process
like another: it has an exit code, gets signals and can be killed. What it does not show is an
import that fails, warns or is slow: tests/test_imports.py and the tests of the README and of the
scripts start Python for that.

A launcher that was forked forks its ranks in turn, where torchrun's would start Python.
"""

import atexit
import contextlib
import functools
import gc
import logging
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

TESTS = Path(__file__).resolve().parent
LOCK = threading.Lock()
STOPS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1)
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["preload"])


def context():
    """The server's, which is started if it was not: for `Process` and `ProcessPoolExecutor`.

    Processes have the environment that the server began with, whatever is set later.
    """
    with LOCK:
        _start_server()
    return CONTEXT


@functools.cache
def _start_server():
    paths = os.pathsep.join(map(str, (TESTS.parent, TESTS)))
    with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}):
        forkserver.ensure_running()


def call(function, *arguments):
    """A started process that calls `function(*arguments)`."""
    process = context().Process(target=_call, args=(function, *arguments))
    process.start()
    return process


def _call(function, *arguments):
    # A child of the server would ask the server for its own children, too.
    multiprocessing.set_start_method(None, force=True)
    function(*arguments)


class Command:
    """`python -m module ...`, `python script.py ...` or `python -c code`, forked.

    Has what is used of a `subprocess.Popen`. It leads a session of its own, as torchrun's ranks do.
    """

    def __init__(self, words, cwd, variables, out, err=None):
        files = [str(out), str(err or out)]
        arguments = (list(map(str, words[1:])), str(cwd), variables, *files)
        self.process = call(_command_main, *arguments)
        self.pid = self.process.pid

    @property
    def returncode(self):
        return self.process.exitcode

    def poll(self):
        return self.process.exitcode

    def wait(self, timeout=None):
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked command", timeout)
        return self.process.exitcode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def start(words, cwd, variables, out):
    """A command in a session of its own, what it says in one file; forked if it is Python's."""
    words = [str(word) for word in words]
    if words[0] == sys.executable:
        return Command(words, cwd, variables, out)
    with Path(out).open("w") as file:
        return subprocess.Popen(
            words,
            cwd=cwd,
            env=variables,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: _hear_signals(STOPS),
        )


def run(words, cwd, variables, timeout):
    """As `subprocess.run` with captured text."""
    words = list(map(str, words))
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        command = Command(words, cwd, variables, out, err)
        try:
            code = command.wait(timeout)
        finally:
            kill_all(command.pid)
        return subprocess.CompletedProcess(words, code, out.read_text(), err.read_text())


def children(pid):
    """The processes that a process has started."""
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False)
    return [int(child) for child in found.stdout.split()]


def kill_all(pid):
    """End a process and those it has started, each with its session."""
    for each in (*children(pid), pid):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(each, signal.SIGKILL)


def _command_main(words, cwd, variables, out, err):
    """In the child: as if Python had been started with these words."""
    os.setsid()
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    descriptors = [os.open("/dev/null", os.O_RDONLY), os.open(out, flags | os.O_APPEND)]
    descriptors.append(descriptors[1] if err == out else os.open(err, flags | os.O_APPEND))
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    os.chdir(cwd)
    # What was started in the background of a shell, or by nohup, ignores some of them.
    _hear_signals(STOPS)
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    subprocess_handler.SubprocessHandler._popen = lambda _, args, env: ForkedRank(args[1:], env)
    # `titan_dit train` becomes the launcher, with the environment that it has made.
    os.execv = lambda _, args: _become(args[1:], dict(os.environ))
    _become(words, variables)


def _hear_signals(numbers):
    """As a Python that was just started hears them."""
    for number in numbers:
        is_interrupt = number == signal.SIGINT
        signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)


def _become(words, variables):
    """Run what Python would run, and end with its exit code."""
    os.environ.clear()
    os.environ.update(variables)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        mode = "w" if number else "r"
        # Unbuffered, as `python -u`, or by lines: a test reads what has been said so far.
        setattr(sys, name, open(number, mode, buffering=1, closefd=False))  # noqa: SIM115
    code = 1
    try:
        _run(words)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except BaseException:
        traceback.print_exc()
    finally:
        # As Python ends: it waits for threads that are no daemons.
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(words):
    """Find the program among Python's own options."""
    words = [word for i, word in enumerate(words) if word != "-u" or "-m" in words[:i]]
    if words[0] == "-m":
        sys.argv[:] = words[1:]
        sys.path.insert(0, str(Path.cwd()))
        sys.modules.pop(words[1], None)  # It runs anew, under the name __main__.
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv[:] = ["-c", *words[2:]]
        sys.path.insert(0, "")
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv[:] = words
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name="__main__")


class ForkedRank:
    """A rank forked from its launcher; has what torchrun uses of a `subprocess.Popen`."""

    def __init__(self, words, variables):
        self.returncode = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self.forget_the_launcher()
            _become(list(words), variables)

    @staticmethod
    def forget_the_launcher():
        """What exec would do."""
        gc.freeze()  # Nothing of the launcher's may be collected and close a descriptor of ours.
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        _hear_signals((signal.SIGINT,))
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        logging.disable(logging.NOTSET)

    def poll(self):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout=None):
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a forked rank", timeout)
            time.sleep(0.01)
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def terminate(self):
        self.send_signal(signal.SIGTERM)
