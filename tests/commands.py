"""Runs titan_dit as a user does: as a process in its own folder."""

import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import forked

ROOT = Path(__file__).resolve().parent.parent


def environment():
    """Environment without torchrun's variables, one thread per rank, this checkout first."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC")}
    # A launcher of a test is forked and has imported what its ranks need: it forks them itself.
    return {"FORK": "0"} | inherited | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def train_command(*flags, ranks=1, config="digits"):
    """The command line; with a launcher for several ranks."""
    words = [sys.executable, "-m", "titan_dit.train"]
    if ranks > 1:
        launcher = ["titan_dit.launcher.launch", "--standalone", "--nproc-per-node", str(ranks)]
        words = [sys.executable, "-m", *launcher, "-m", "titan_dit.train"]
    return [*words, "--config", config, *map(str, flags)]


def run(command, cwd, timeout=240, **variables):
    """Run a command to its end, with output as text; Python commands are forked."""
    command = [str(word) for word in command]
    variables = environment() | {name: str(value) for name, value in variables.items()}
    if command[0] == sys.executable:
        return forked.run(command, cwd, variables, timeout)
    return subprocess.run(
        command,
        cwd=cwd,
        env=variables,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def measured(command, cwd, timeout=240):
    """Like `run`; also returns the `resource.struct_rusage` of this process alone.

    `getrusage(RUSAGE_CHILDREN)` is the maximum over all children so far.
    """
    words = [str(word) for word in command]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(words, cwd=cwd, env=environment(), stdout=out, stderr=err)
        alarm = threading.Timer(timeout, process.kill)
        alarm.start()
        try:
            _, status, used = os.wait4(process.pid, 0)
        finally:
            alarm.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        text = (out.read(), err.read())
    return subprocess.CompletedProcess(words, process.returncode, *text), used


def train(*flags, cwd, ranks=1, config="digits"):
    """`python -m titan_dit.train`, with flags."""
    return run(train_command(*flags, ranks=ranks, config=config), cwd)


def sample(*flags, cwd):
    """`python -m titan_dit sample`."""
    return run([sys.executable, "-m", "titan_dit", "sample", *flags], cwd)


def metrics(folder):
    """The rows of metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def only_error(done):
    """Assert that a command failed with one error; return its stderr."""
    assert done.returncode == 2, done.stdout + done.stderr
    lines = done.stderr.strip().splitlines()
    assert lines[0].startswith("error: "), done.stderr
    assert done.stderr.count("error:") == 1
    assert "Traceback" not in done.stderr
    return done.stderr
