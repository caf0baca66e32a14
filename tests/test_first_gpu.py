"""scripts/first_gpu.sh: what a bare machine runs in one call. Its rehearsal is a long test."""

import io
import json
import os
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path

import pytest
from commands import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import first_gpu
from first_gpu import Ended, Report, Runner


@pytest.fixture
def runner(monkeypatch):
    """A runner whose commands have three seconds to close."""
    monkeypatch.setattr(first_gpu, "CLOSING_S", 3.0)
    return Runner(60.0, io.StringIO())


# A command that ignores SIGINT, and leaves a process in a session of its own.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
sleep = [sys.executable, "-c", "import time; time.sleep(100)"]
left = subprocess.Popen(sleep, start_new_session=True)
print(left.pid, flush=True)
time.sleep(100)
"""


def test_a_part_at_its_limit_is_killed_with_all_that_it_started_and_the_next_one_runs():
    """In a process of its own: the runner becomes the parent of every orphan."""
    code = f"""
import ctypes, io, json, os, sys
sys.path.insert(0, {str(ROOT / "scripts")!r})
import first_gpu
ctypes.CDLL(None).prctl(first_gpu.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
first_gpu.CLOSING_S = 2.5
runner = first_gpu.Runner(60.0, io.StringIO())
runner.begin_part(1.5)
stubborn = runner.run([sys.executable, "-c", {STUBBORN!r}])
runner.begin_part(20.0)
good = runner.run([sys.executable, "-c", "print('hello')"])
print(json.dumps([str(stubborn), stubborn.lines, str(good), good.lines]))
"""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    stubborn, [orphan], good, lines = json.loads(done.stdout.splitlines()[-1])
    assert stubborn.startswith("stopped at its limit")
    assert good.startswith("exit code 0")
    assert lines == ["hello"]
    assert not Path(f"/proc/{orphan}").exists()
    assert time.monotonic() - began < 20


def test_a_part_has_its_limit_and_what_is_left_of_the_whole(runner):
    runner.begin_part(30.0)
    assert runner.left_s == pytest.approx(30.0, abs=1)
    runner.begin_part(1000.0)
    # Three seconds are kept for its end and for the summary.
    assert runner.left_s == pytest.approx(57.0, abs=1)


class Recorded:
    """In place of a runner: commands, and how they are said to have ended."""

    left_s = 100.0
    seconds = 1.0

    def __init__(self, *ended):
        self.ended, self.commands = list(ended), []

    def begin_part(self, limit_s):
        self.limit_s = limit_s

    def run(self, command, *_, **__):
        self.commands.append([str(word) for word in command])
        return self.ended.pop(0)

    def say(self, line):
        """Nobody listens."""


def ended(*lines, code=0, in_time=True):
    return Ended(code, 1.0, list(lines), in_time)


PYTEST = (
    "tests/test_gpu.py::test_a ",
    "[gw1] [ 50%] PASSED tests/test_gpu.py::test_a",
    "[gw0] [ 75%] FAILED tests/kernels/test_attention.py::test_b[bf16 of 72]",
    "[gw0] [ 80%] ERROR tests/test_gpu.py::test_c",
    "[gw0] [100%] SKIPPED tests/test_gpu.py::test_d",
)


def test_tests_that_fail_are_named_also_if_the_time_ends_before_them(tmp_path):
    for how in ({"code": 1}, {"code": 2, "in_time": False}):
        report = Report()
        first_gpu.tests(Recorded(ended(*PYTEST, **how)), report, Path("python"), tmp_path, False)
        counts, *failed = report.said["tests"]
        assert counts.startswith("  1 passed, 1 failed, 1 error, 1 skipped; ")
        assert failed == [
            "  failed tests/kernels/test_attention.py::test_b[bf16 of 72]",
            "  error tests/test_gpu.py::test_c",
        ]
        assert report.failed == ["tests"]


@pytest.mark.parametrize(
    ("line", "is_tiny", "failed"),
    [(PYTEST[-1], True, []), (PYTEST[-1], False, ["tests"]), (PYTEST[1], True, [])],
)
def test_a_gpu_that_no_test_used_is_a_failure_but_in_a_rehearsal(tmp_path, line, is_tiny, failed):
    report = Report()
    first_gpu.tests(Recorded(ended(line)), report, Path("python"), tmp_path, is_tiny)
    assert report.failed == failed


def test_every_file_with_a_test_for_a_gpu_is_run():
    done = [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")]
    files = first_gpu.gpu_tests()
    assert {"tests/test_gpu.py", "tests/parallel/test_float8.py"} <= set(files) < set(done)
    assert not [name for name in files if not (ROOT / name).is_file()]
    file, test = first_gpu.LONG.split("::")
    assert file in files
    assert f"def {test}(" in (ROOT / file).read_text()


def test_a_fault_costs_its_part_only(tmp_path, monkeypatch):
    monkeypatch.setattr(first_gpu, "environment", lambda *_: Path("python"))
    monkeypatch.setattr(first_gpu, "WORK", tmp_path / "work")
    # The tests' runner raises; training ends with an error; the benchmark runs.
    runner = Recorded(*[ended(code=1)] * 3, ended())
    monkeypatch.setattr(first_gpu, "gpu_tests", lambda: 1 / 0)
    monkeypatch.setattr(sys, "argv", ["first_gpu.py", "--", "--parts", "max_tokens"])
    report = Report()
    first_gpu.take(first_gpu.parse(), runner, report, tmp_path)
    assert report.failed == ["tests", "digits"]
    assert report.said["tests"] == ["  ZeroDivisionError: division by zero"]
    assert runner.commands[-1][1] == "benchmarks/gpu.py"
    assert runner.commands[-1][-2:] == ["--parts", "max_tokens"]
    assert (tmp_path / "summary.txt").read_text().endswith("failed: tests, digits\n")


def test_the_environment_has_the_wheels_and_what_this_python_has(tmp_path, monkeypatch, runner):
    """Also where no pip is, and again after a copy to another place."""
    there = tmp_path / "there"
    there.mkdir()
    (there / "theirs.py").write_text("")
    monkeypatch.setattr(first_gpu, "WORK", tmp_path / "work")
    monkeypatch.setattr(first_gpu, "WHEELS", tmp_path)
    # It would end the fork server of other tests, a child of this process.
    monkeypatch.setattr(first_gpu, "end_children", lambda: None)
    monkeypatch.setenv("PYTHONPATH", str(there))
    with zipfile.ZipFile(tmp_path / "ours-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("ours/__init__.py", "")
    imports = "import ours, theirs, pytest, titan_dit; print(ours.__file__)"

    def where():
        python = first_gpu.make_environment(runner)
        bare = {"PATH": os.environ["PATH"]}
        words = [python, "-c", imports]
        return subprocess.run(
            words, cwd=tmp_path, env=bare, capture_output=True, text=True, check=True
        ).stdout

    assert where().startswith(str(tmp_path / "work"))
    (tmp_path / "work" / "environment" / "bin" / "python").unlink()
    assert where().startswith(str(tmp_path / "work"))
    of_another_machine = tmp_path / "work" / "environment" / "left"
    of_another_machine.touch()
    monkeypatch.setattr(first_gpu.sys, "version", "that of another machine")
    assert where().startswith(str(tmp_path / "work"))
    assert not of_another_machine.exists()
    # A folder that cannot be written costs the wheels only.
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(first_gpu, "WORK", tmp_path / "file")
    recorded, report = Recorded(*[ended(code=1)] * 3), Report()
    assert first_gpu.environment(recorded, report) == Path(sys.executable)


def test_the_facts_are_found_among_warnings():
    lines = ["a warning", 'facts: {"device": "H100"}', "another, at the exit"]
    report = Report()
    first_gpu.environment(Recorded(*[ended(*lines)] * 4), report)
    assert report.facts == {"device": "H100"}


def test_figures_of_an_earlier_call_are_not_those_of_a_benchmark_that_fails(tmp_path):
    (tmp_path / "gpu.json").write_text(json.dumps(BENCHMARK))
    report = Report()
    first_gpu.gpu(Recorded(ended(code=2)), report, Path("python"), tmp_path, [])
    assert report.said["gpu"] == ["  exit code 2 after 1 s"]


ROW = {"model": "XL/2", "tokens": 256, "batch": 128}
BENCHMARK = {
    "failed": {"XL/2 256 128 ours 1": "failed: E", "copy": "out of memory"},
    "rows": [
        {**ROW, "contender": "ours", "peak GiB": "50.9", "dry run GiB (eager)": "51.1"},
        {**ROW, "contender": "ours_compiled", "peak GiB": "-", "dry run GiB (eager)": "51.1"},
        {**ROW, "contender": "plain", "peak GiB": "60.0", "dry run GiB (eager)": "-"},
    ],
    "targets": [
        {"target": "MFU", "at least": "0.45", "measured": "0.500 (ours)", "met": "yes"},
        {"target": "speed", "at least": "1.3", "measured": "not measured", "met": "-"},
    ],
    "verdicts": [
        {"finding": "idle share", "figure": "0.01", "threshold": "0.05", "verdict": "ahead"},
        {"finding": "EMA", "figure": "-", "threshold": "1.05", "verdict": "not measured"},
    ],
    "not_begun": ["a", "b"],
}


def test_the_summary_has_what_was_measured_beside_its_target():
    assert first_gpu.benchmark_lines(BENCHMARK) == [
        "  XL/2 256 128 ours 1: failed: E",
        "  copy: out of memory",
        "  MFU: 0.500 (ours), at least 0.45: yes",
        "  XL/2 256 128 ours: peak 50.9 GiB, eager dry run 51.1",
        "  idle share: 0.01, ahead",
        "  2 rows were not begun, for want of time",
    ]


def test_the_summary_is_short_and_ends_with_what_failed():
    facts = {"device": "H100", "torch": "2.11.0"}
    report = Report("first GPU", facts, {"gpu": ["  a line"] * 100}, ["gpu"])
    lines = report.lines(12.0)
    assert len(lines) == first_gpu.MOST_LINES
    assert lines[:2] == ["first GPU: H100, 12 s", "  torch 2.11.0"]
    assert lines[-2:] == ["  (45 more lines in log.txt and gpu.json)", "failed: gpu"]
    assert Report().lines(1.0)[-1] == "every part ended well"


def test_the_wheels_are_packages_of_the_lock_files_and_the_python_is_checked():
    script = ROOT / "scripts" / "gpu_wheels.sh"
    done = subprocess.run([script, "3.9"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "give a Python from 3.11" in done.stderr
    lines = (line for line in script.read_text().splitlines() if line.startswith("names"))
    names = "".join(line.split("'")[1] for line in lines).split("|")
    locks = "".join((ROOT / f"requirements{x}.lock").read_text() for x in ("", "-dev"))
    pinned = {line.split("==")[0] for line in locks.splitlines()}
    assert set(names) <= pinned
    # All that the package needs but is not in the table of docs/gpu.md.
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    there = {"torch", "fsspec", "safetensors", "tensorboard", "Pillow", "numpy"}
    assert {first_gpu.re.match(r"[\w-]+", name)[0] for name in needed} - there <= set(names)


@pytest.mark.long
def test_the_rehearsal_runs_from_a_copy_without_git_to_its_summary(tmp_path):
    copy = tmp_path / "copy"
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    for name in filter(None, tracked.stdout.decode().split("\0")):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((ROOT / name).read_bytes())
    variables = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "TITAN_DIT_COMMIT": "0123abc"}
    variables |= {"PYTHON": sys.executable, "OUT": str(tmp_path / "out")}
    command = ["bash", "scripts/first_gpu.sh", "--tiny"]
    done = subprocess.run(
        command, cwd=copy, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    names = {path.name for path in (tmp_path / "out").iterdir()}
    pictures = {"digits.png", "digits_loss.png"}
    assert names == {"summary.txt", "log.txt", "gpu.json", "tests.xml", *pictures}
    summary = (tmp_path / "out" / "summary.txt").read_text().splitlines()
    assert len(summary) <= first_gpu.MOST_LINES
    assert summary == done.stdout.splitlines()[-len(summary) :]
    assert "commit 0123abc, " in summary[1]
    assert "  3-NN agreement: " in "\n".join(summary)
    assert summary[-1] == "every part ended well"
