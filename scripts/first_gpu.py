"""What scripts/first_gpu.sh runs: GPU tests, a trained model and the benchmark, then a summary.

Every part has a time limit, and a fault costs that part only. Results are written as they come. The
standard library only, so that it runs before the environment is made.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "outputs" / "first_gpu"
WHEELS = ROOT / "benchmarks" / "wheels"
PARTS = ("tests", "digits", "gpu")
BUDGET_S = 560.0
LIMITS_S = {"environment": 90.0, "tests": 150.0, "digits": 80.0, "gpu": 360.0}
"""Limit of each part; `gpu` also ends with the budget."""
REHEARSAL = 4
"""With --tiny all limits are so many times longer: a busy CPU is slow."""
CLOSING_S = 12.0
"""Kept for a part that is stopped at its limit, and for the summary."""
TEST_S = 100
"""Limit of one test. Some compile."""
NUM_STEPS = 700
"""Training steps of the digits."""
LONG = "tests/benchmarks/test_gpu_benchmark.py::test_on_a_gpu_memory_is_counted"
"""Runs the whole of gpu.py, which is a part of its own."""
MOST_LINES = 60
FACTS = "facts: "
PR_SET_CHILD_SUBREAPER = 36


@dataclass
class Ended:
    """How a command ended."""

    code: int
    seconds: float
    lines: list[str]
    in_time: bool

    @property
    def is_good(self) -> bool:
        """True if it ended by itself with exit code 0."""
        return self.code == 0 and self.in_time

    def __str__(self) -> str:
        """In words."""
        how = f"exit code {self.code}" if self.in_time else "stopped at its limit"
        return f"{how} after {self.seconds:.0f} s"


@dataclass
class Report:
    """What is known so far; `lines` make the summary."""

    title: str = "first GPU"
    facts: dict[str, Any] = field(default_factory=dict)
    said: dict[str, list[str]] = field(default_factory=dict)
    """Lines of each part."""
    failed: list[str] = field(default_factory=list)

    def lines(self, seconds: float) -> list[str]:
        """The summary, of at most MOST_LINES lines."""
        title = f"{self.title}: {self.facts.get('device', 'unknown device')}, {seconds:.0f} s"
        facts = [f"{key} {value}" for key, value in self.facts.items() if key != "device"]
        about = [f"  {', '.join(facts)}"] if facts else []
        parts = [line for name, lines in self.said.items() for line in (f"{name}:", *lines)]
        end = f"failed: {', '.join(self.failed)}" if self.failed else "every part ended well"
        whole = [title, *about, *parts]
        if len(whole) >= MOST_LINES:
            left = len(whole) - (MOST_LINES - 2)
            whole = [*whole[: MOST_LINES - 2], f"  ({left} more lines in log.txt and gpu.json)"]
        return [*whole, end]


class Runner:
    """Runs commands within the time that is left, with their output in the log and on stdout."""

    def __init__(self, budget_s: float, log: TextIO) -> None:
        self.began, self.log = time.monotonic(), log
        self.end = self.part_end = self.began + budget_s
        self.environment = {
            **os.environ,
            "NGPU": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *own_folders()]),
            "PYTHONUNBUFFERED": "1",
            # Parts, and a second call, share compiled code.
            "TORCHINDUCTOR_CACHE_DIR": str(WORK / "inductor"),
        }

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.began

    @property
    def left_s(self) -> float:
        """Seconds of the part that are left for a command."""
        return min(self.part_end, self.end - CLOSING_S) - time.monotonic()

    def begin_part(self, limit_s: float) -> None:
        """The commands that follow have so many seconds together."""
        self.part_end = time.monotonic() + limit_s

    def say(self, line: str) -> None:
        """Write a line to the log and to stdout."""
        for file in (self.log, sys.stdout):
            file.write(line + "\n")
            file.flush()

    def run(
        self, command: Sequence[object], stop: signal.Signals = signal.SIGINT, share: float = 1.0
    ) -> Ended:
        """Run a command for at most a share of the seconds that its part has left.

        At this limit it gets `stop`, and a few seconds later it is killed.
        """
        limit_s = max(1.0, share * self.left_s)
        words = [str(word) for word in command]
        shown = [word.removeprefix(f"{ROOT}/") for word in words]
        self.say(f"\n[{self.seconds:.0f} s, limit {limit_s:.0f}] {' '.join(shown)}")
        began, lines, in_time = time.monotonic(), list[str](), True
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        reader = threading.Thread(target=self.read, args=(process.stdout, lines), daemon=True)
        reader.start()
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            in_time = False
            process.send_signal(stop)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(CLOSING_S - 2)
        finally:
            end_children()
            process.wait()
            reader.join(2)
        ended = Ended(process.returncode, time.monotonic() - began, lines, in_time)
        self.say(f"[{self.seconds:.0f} s] {ended}")
        return ended

    def read(self, pipe: TextIO, lines: list[str]) -> None:
        """Copy a command's output until it ends."""
        for line in pipe:
            lines.append(line.rstrip("\n"))
            self.say(lines[-1])


def own_folders() -> list[str]:
    """Folders of the PYTHONPATH that this process was started with."""
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def end_children() -> None:
    """Kill what a command left, so that no process holds the device during the next part.

    Orphans become children of this process, which is their subreaper.
    """
    while pids := list(children()):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def children() -> Iterator[int]:
    """Pids of the child processes."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name, in parentheses, can contain anything.
            parent = stat.read_text().rpartition(")")[2].split()[1]
            if int(parent) == os.getpid():
                yield int(stat.parent.name)


def make_environment(runner: Runner) -> Path:
    """The Python of a virtual environment with the wheels and this Python's packages.

    A .pth file names them: some tests start processes without PYTHONPATH. A wheel is a zip file,
    and is unpacked without pip, which this Python may lack. Without wheels this Python is taken as
    it is.
    """
    wheels = sorted(WHEELS.glob("*.whl"))
    if not wheels:
        runner.say("no wheels in benchmarks/wheels (scripts/gpu_wheels.sh): using this Python")
        return Path(sys.executable)
    folder = WORK / "environment"
    packages = folder / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    python = folder / "bin" / "python"
    theirs = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    theirs += own_folders()
    # A checkout may be copied to another machine after a rehearsal.
    made_of = [sys.executable, sys.version, str(ROOT), *theirs, *(wheel.name for wheel in wheels)]
    complete = folder / "complete"
    is_whole = python.exists() and complete.exists()
    if not is_whole or complete.read_text() != "\n".join(made_of):
        shutil.rmtree(folder, ignore_errors=True)
        if not runner.run([sys.executable, "-m", "venv", "--without-pip", folder]).is_good:
            runner.say("the environment could not be made: using this Python")
            return Path(sys.executable)
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as files:
                files.extractall(packages)
        lines = [str(ROOT), *(f"import site; site.addsitedir({path!r})" for path in theirs)]
        (packages / "first_gpu.pth").write_text("\n".join(lines) + "\n")
        complete.write_text("\n".join(made_of))
    return python


def environment(runner: Runner, report: Report) -> Path:
    """Make the environment, say what it lacks, and read torch once from the disk."""
    try:
        python = make_environment(runner)
    except (OSError, zipfile.BadZipFile) as error:
        runner.say(f"the environment could not be made, using this Python: {error}")
        python = Path(sys.executable)
    lacking = runner.run([python, ROOT / "scripts" / "needs.py"])
    report.said["environment"] = [f"  {line}" for line in lacking.lines if "lacks" in line]
    found = runner.run([python, __file__, "--facts"])
    # Warnings may follow it.
    told = [line.removeprefix(FACTS) for line in found.lines if line.startswith(FACTS)]
    if told:
        report.facts = json.loads(told[0])
    if not found.is_good:
        report.failed.append("environment")
        report.said["environment"] += found.lines[-3:]
    return python


def facts() -> dict[str, object]:
    """Device and versions, read by the environment's Python."""
    import importlib
    import importlib.metadata

    import torch

    sys.path.insert(0, str(ROOT / "benchmarks"))
    found: dict[str, object] = dict(importlib.import_module("report").place())
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["memory"] = f"{properties.total_memory / 2**30:.1f} GiB"
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    for name in ("triton", "torchao", "pytest"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def gpu_tests() -> list[str]:
    """Files with tests that need a GPU."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(f.relative_to(ROOT)) for f in files if "pytest.mark.gpu" in f.read_text()]


def processes() -> int:
    """Processes of the GPU tests: two cores for each, as some start ranks or compile; 4 to 8."""
    return max(4, min(8, (os.cpu_count() or 1) // 2))


OUTCOME = re.compile(r"\[gw\d+\] \[ *\d+%\] (PASSED|FAILED|ERROR|SKIPPED|XFAIL) (.+)")


def tests(runner: Runner, report: Report, python: Path, out: Path, is_tiny: bool) -> None:
    """The GPU tests, by the names of their files."""
    command: list[object] = [python, "-m", "pytest", *gpu_tests(), "-vv", "-n", processes()]
    # Nothing may run beside those marked `alone`; the benchmark does what they test.
    command += [
        "-m",
        "gpu and not alone",
        "--dist",
        "worksteal",
        "--timeout",
        TEST_S,
        "--deselect",
        LONG,
    ]
    command += ["-p", "no:cacheprovider", f"--junitxml={out / 'tests.xml'}"]
    ended = runner.run(command)
    matches = filter(None, map(OUTCOME.match, ended.lines))
    outcomes = {match[2]: match[1] for match in matches}
    counts = Counter(outcome.lower() for outcome in outcomes.values())
    said = [f"  {', '.join(f'{n} {outcome}' for outcome, n in counts.items()) or 'none'}; {ended}"]
    said += [
        f"  {outcome.lower()} {name}"
        for name, outcome in outcomes.items()
        if outcome in ("FAILED", "ERROR")
    ]
    report.said["tests"] = said
    # A rehearsal without a GPU skips all of them.
    if not ended.is_good or not (counts["passed"] or (is_tiny and counts["skipped"])):
        report.failed.append("tests")


def digits(runner: Runner, report: Report, python: Path, out: Path, steps: int) -> None:
    """Train the default run in bf16, compiled, and draw samples from its checkpoint."""
    run = WORK / "digits"
    shutil.rmtree(run, ignore_errors=True)
    command: list[object] = [python, "-m", "titan_dit", "train", "--config", "digits.toml"]
    command += ["--job.dir", run, "--training.steps", steps, "--sampling.every", 0]
    command += ["--precision.dtype", "bf16", "--compile.enabled", "true"]
    # A third is left for the samples. SIGTERM lets the run save its last step.
    trained = runner.run(command, signal.SIGTERM, share=2 / 3)
    said = report.said["digits"] = [f"  training of {steps} steps in bf16, compiled: {trained}"]
    judge = [python, "benchmarks/digits.py", "--run", run, "--out", WORK / "digits.json"]
    judged = runner.run(judge)
    if judged.is_good:
        [row] = json.loads((WORK / "digits.json").read_text())["rows"]
        said += [f"  {key}: {value}" for key, value in row.items() if key != "run"]
    picture = [python, "-m", "titan_dit", "sample", "--run", run, "--num", 120]
    drawn = runner.run([*picture, "--out", out / "digits.png"])
    with contextlib.suppress(OSError):
        shutil.copy(run / "loss.png", out / "digits_loss.png")
    if not (trained.is_good and judged.is_good and drawn.is_good):
        report.failed.append("digits")


def gpu(runner: Runner, report: Report, python: Path, out: Path, flags: Sequence[str]) -> None:
    """The benchmark of one GPU, in what is left of the time; `flags` are its own."""
    budget = max(1.0, runner.left_s - 5)
    command: list[object] = [python, "benchmarks/gpu.py", "--out", out / "gpu.json"]
    command += ["--budget-s", f"{budget:.0f}", *flags]
    # It may fail before it writes: the figures of an earlier call are not its own.
    (out / "gpu.json").unlink(missing_ok=True)
    ended = runner.run(command, signal.SIGTERM)
    report.said["gpu"] = [f"  {ended}"]
    if not ended.is_good:
        report.failed.append("gpu")
    with contextlib.suppress(OSError):
        report.said["gpu"] += benchmark_lines(json.loads((out / "gpu.json").read_text()))


def benchmark_lines(found: dict[str, Any]) -> list[str]:
    """Faults, figures beside their targets, peaks and verdicts of gpu.py's JSON."""
    lines = [f"  {name}: {result}" for name, result in found["failed"].items()]
    for row in found["targets"]:
        if row["met"] != "-":
            asked = f"at least {row['at least']}: {row['met']}"
            lines.append(f"  {row['target']}: {row['measured']}, {asked}")
    for row in found["rows"]:
        predicted = row["dry run GiB (eager)"]
        if row["contender"] in ("ours", "ours_compiled") and "-" not in (
            row["peak GiB"],
            predicted,
        ):
            name = " ".join(str(row[key]) for key in ("model", "tokens", "batch", "contender"))
            lines.append(f"  {name}: peak {row['peak GiB']} GiB, eager dry run {predicted}")
    for row in found["verdicts"]:
        if row["figure"] != "-":
            lines.append(f"  {row['finding']}: {row['figure']}, {row['verdict']}")
    if left := len(found["not_begun"]):
        lines.append(f"  {left} rows were not begun, for want of time")
    return lines


def parse() -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="rehearse on any machine")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("flags", nargs="*", help="after --: flags of benchmarks/gpu.py")
    parser.add_argument("--budget-s", type=float, help=f"limit of all ({BUDGET_S:.0f})")
    parser.add_argument("--out", type=Path, help="folder of results ($OUT)")
    parser.add_argument("--facts", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def interrupted(*_: object) -> None:
    """SIGTERM, which a time limit sends, ends as Ctrl-C does: with the summary."""
    raise KeyboardInterrupt


def take(options: argparse.Namespace, runner: Runner, report: Report, out: Path) -> None:
    """Run the parts, in order; write the summary after each."""
    slower = REHEARSAL if options.tiny else 1
    steps = 50 if options.tiny else NUM_STEPS
    flags = [*options.flags, *["--tiny"] * options.tiny]
    runner.begin_part(slower * LIMITS_S["environment"])
    python = environment(runner, report)
    parts = {
        "tests": lambda: tests(runner, report, python, out, options.tiny),
        "digits": lambda: digits(runner, report, python, out, steps),
        "gpu": lambda: gpu(runner, report, python, out, flags),
    }
    for name in PARTS:
        if name in options.parts:
            runner.begin_part(slower * LIMITS_S[name])
            try:
                parts[name]()
            except Exception as error:
                report.failed.append(name)
                report.said.setdefault(name, []).append(f"  {type(error).__name__}: {error}")
            write_summary(runner, report, out)


def write_summary(runner: Runner, report: Report, out: Path) -> list[str]:
    """Write summary.txt; returns its lines."""
    lines = report.lines(runner.seconds)
    (out / "summary.txt").write_text("\n".join(lines) + "\n")
    return lines


def main() -> int:
    """Return 0 if every part ended well."""
    options = parse()
    if options.facts:
        sys.stdout.write(f"{FACTS}{json.dumps(facts())}\n")
        # What all parts import is read from the disk. It fails if a package is missing.
        import titan_dit.trainer  # noqa: F401

        return 0
    out = options.out or Path(os.environ.get("OUT") or WORK / "results")
    for folder in (out, WORK):
        folder.mkdir(parents=True, exist_ok=True)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, interrupted)
    report, code = Report(), 0
    if options.tiny:
        report.title = "rehearsal of the first GPU, whose figures mean nothing"
    with (out / "log.txt").open("w") as log:
        budget = options.budget_s or BUDGET_S * (REHEARSAL if options.tiny else 1)
        runner = Runner(budget, log)
        try:
            take(options, runner, report, out)
        except KeyboardInterrupt:
            report.failed.append("interrupted")
            code = 130
        runner.say("")
        for line in write_summary(runner, report, out):
            runner.say(line)
    return code or int(bool(report.failed))


if __name__ == "__main__":
    sys.exit(main())
