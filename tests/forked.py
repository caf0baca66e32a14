"""Processes forked from a server that has imported torch and titan_dit once.

Importing torch takes seconds of a core, a fork hundredths. A forked process has an exit code, gets
signals and can be killed. It cannot show an import that fails, warns or is slow: for that
tests/test_imports.py and the tests of the README and the scripts start Python.

A forked launcher forks its ranks, where torchrun's starts Python.
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
BENCHMARKER = "TORCHINDUCTOR_USE_EXPERIMENTAL_BENCHMARKER"


def context():
    """The server's context, for `Process` and `ProcessPoolExecutor`; starts the server once.

    Processes have the environment of the server's start.
    """
    with LOCK:
        _start_server()
    return CONTEXT


@functools.cache
def _start_server():
    with mock.patch.dict(os.environ, server_variables()):
        forkserver.ensure_running()


def server_variables():
    """Variables of the server, which imports preload.py."""
    return {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(map(str, (TESTS.parent, TESTS))),
        # With it torch 2.11 looks for a GPU when the compiler is imported: after that a forked
        # process cannot use one. It only chooses how kernels are timed.
        BENCHMARKER: "0",
    }


def call(function, *arguments):
    """Start a process that calls `function(*arguments)`."""
    process = context().Process(target=_call, args=(function, *arguments))
    process.start()
    return process


def _call(function, *arguments):
    # A child of the server would ask the server for its own children, too.
    multiprocessing.set_start_method(None, force=True)
    function(*arguments)


class Command:
    """`python -m module ...`, `python script.py ...` or `python -c code`, forked.

    Has the used part of `subprocess.Popen`. Leads its own session, as torchrun's ranks do.
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
    """Start a command in its own session, all output in one file; Python commands are forked."""
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
    """Like `subprocess.run` with captured text."""
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
    """Pids of the child processes; of a launcher those of its ranks, whoever forks them."""
    pids = []
    for child in direct_children(pid):
        with contextlib.suppress(OSError):
            is_server = b"fork_server" in Path(f"/proc/{child}/cmdline").read_bytes()
            pids += direct_children(child) if is_server else [child]
    return pids


def direct_children(pid):
    """Pids of the child processes."""
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False)
    return [int(child) for child in found.stdout.split()]


def kill_all(pid):
    """Kill a process and its children, each with its process group."""
    for each in (*children(pid), pid):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(each, signal.SIGKILL)


def _command_main(words, cwd, variables, out, err):
    """In the child: behave like a Python started with `words`."""
    os.setsid()
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    descriptors = [os.open("/dev/null", os.O_RDONLY), os.open(out, flags | os.O_APPEND)]
    descriptors.append(descriptors[1] if err == out else os.open(err, flags | os.O_APPEND))
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    os.chdir(cwd)
    # Background jobs of a shell, and nohup, ignore some signals.
    _hear_signals(STOPS)
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    subprocess_handler.SubprocessHandler._popen = lambda _, args, env: ForkedRank(args[1:], env)
    # `titan_dit train` execs the launcher with its own environment.
    os.execv = lambda _, args: _become(args[1:], dict(os.environ))
    _become(words, variables)


def _hear_signals(numbers):
    """Restore the signal handlers of a new Python."""
    for number in numbers:
        is_interrupt = number == signal.SIGINT
        signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)


def _become(words, variables):
    """Run the Python command line `words` and exit with its code."""
    os.environ.clear()
    os.environ.update(variables)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        mode = "w" if number else "r"
        # Line-buffered: tests read the output of running processes.
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
        # Like Python's exit, which waits for non-daemon threads.
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(words):
    """Run the program in a Python command line."""
    words = [word for i, word in enumerate(words) if word != "-u" or "-m" in words[:i]]
    if words[0] == "-m":
        sys.argv[:] = words[1:]
        sys.path.insert(0, str(Path.cwd()))
        sys.modules.pop(words[1], None)  # Run again, as __main__.
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
    """A rank forked from its launcher; has the part of `subprocess.Popen` that torchrun uses."""

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
        """Reset the process as exec does."""
        gc.freeze()  # Collecting an object of the launcher could close a descriptor of the rank.
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
