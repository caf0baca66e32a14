"""Mutation tests: plant known bugs, one at a time, and report which test catches each.

`python scripts/plant.py [NAME or GLOB ...]` plants the bugs of tests/plants.toml in temporary
copies of the tree and runs the tests that should fail there. The exit code is 1 if a bug survives
without a `survives` reason. `--draw 30 --seed N` prints random one-line mutants instead.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import queue
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

from plant_rows import PACKAGE, Plant, PlantError, fast_first, prepare, read_plants
from plant_runner import Runner

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv*", "outputs", "build", "__pycache__", "*.egg-info", ".*_cache"
)
FAILURE = re.compile(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """Result of the tests on one tree."""

    verdict: str
    """caught, crashed, timed out, survived; not judged if the tests fail without the bug."""
    by: str
    """The first failing test, or another reason why the run ended."""
    seconds: float


def run_tests(
    runner: Runner, folder: Path, tests: Sequence[str], timeout: float, *more: str
) -> tuple[Outcome, str]:
    """Run tests in a tree; return (outcome, pytest's output). Raises PlantError."""
    began = time.monotonic()
    options = ["-q", "-p", "no:cacheprovider", "--color=no", *more]
    code, output = runner.run(folder, [*options, *tests], timeout)
    seconds = round(time.monotonic() - began, 1)
    failed = failures(output)
    if code is None:
        return Outcome("timed out", f"after {timeout:g} s", seconds), output
    if code == 0:
        return Outcome("survived", "", seconds), output
    if code in (1, 2) and failed:
        return Outcome("caught", failed[0], seconds), output
    if code in (4, 5):
        raise PlantError(f"pytest found none of {', '.join(tests)}:\n{output[-2000:]}")
    return Outcome("crashed", f"pytest's exit code {code}", seconds), output


def failures(output: str) -> list[str]:
    """Failed tests in pytest's summary; log lines before it may contain ERROR, too."""
    return FAILURE.findall(output.rpartition("short test summary info")[2])


class TreePool:
    """A pool of tree copies, each with a runner; a copy has a bug only while its tests run."""

    def __init__(self, root: Path, folder: Path, jobs: int, timeout: float) -> None:
        self.timeout = timeout
        self.free: queue.Queue[tuple[Path, Runner]] = queue.Queue()
        self.runners = []
        for number in range(jobs):
            copy, runner = folder / f"copy-{number}", Runner()
            shutil.copytree(root, copy, ignore=LEFT_OUT, symlinks=True)
            self.runners.append(runner)
            self.free.put((copy, runner))

    def failing_without_bug(self, tests: Sequence[str]) -> Sequence[str]:
        """Tests that fail without any bug; all of them if the run did not finish."""
        copy, runner = self.free.get()
        outcome, output = run_tests(runner, copy, tests, self.timeout * len(tests))
        self.free.put((copy, runner))
        if outcome.verdict == "caught":
            sys.stderr.write(output[-3000:])
            return failures(output)
        return [] if outcome.verdict == "survived" else tests

    def plant(self, file: Path, source: str, tests: Sequence[str]) -> Outcome:
        """Run the tests with `source` in place of a file."""
        copy, runner = self.free.get()
        kept = (copy / file).read_text()
        try:
            self.write(copy / file, source)
            return run_tests(runner, copy, tests, self.timeout, "-x")[0]
        finally:
            self.write(copy / file, kept)
            self.free.put((copy, runner))

    def close(self) -> None:
        """Stop the runners."""
        for runner in self.runners:
            runner.close()

    @staticmethod
    def write(file: Path, source: str) -> None:
        """Write a source and delete its bytecode.

        Python checks size and mtime in seconds, which can be equal for two versions.
        """
        file.write_text(source)
        for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
            compiled.unlink()


def run_all(
    root: Path, plants: Sequence[Plant], override: Sequence[str], jobs: int, timeout: float
) -> dict[str, Outcome]:
    """The outcome of every plant, by name."""
    ready = prepare(root, plants, override)
    every = fast_first({test for _, _, tests in ready.values() for test in tests})
    outcomes: dict[str, Outcome] = {}
    with (
        tempfile.TemporaryDirectory(prefix="plants-") as folder,
        closing(TreePool(root, Path(folder), jobs, timeout)) as trees,
    ):
        say(f"{len(plants)} plants; first their tests without a bug: {len(every)}")
        failing = trees.failing_without_bug(every)
        with ThreadPoolExecutor(jobs) as pool:
            running = {}
            for plant in plants:
                file, source, tests = ready[plant.name]
                broken = [f for f in failing if any(f.startswith(test) for test in tests)]
                if broken:
                    outcomes[plant.name] = Outcome("not judged", f"{broken[0]} fails anyway", 0.0)
                else:
                    running[pool.submit(trees.plant, file, source, tests)] = plant.name
            began = time.monotonic()
            for done, future in enumerate(as_completed(running), start=1):
                outcomes[running[future]] = outcome = future.result()
                left = (time.monotonic() - began) / done * (len(running) - done)
                about = f"{done}/{len(running)}, {left:.0f} s left"
                say(f"{about}: {running[future]} {outcome.verdict} {outcome.by}")
    return outcomes


def say(line: str) -> None:
    """Print a progress line to stderr."""
    sys.stderr.write(f"{line}\n")


def report(plants: Sequence[Plant], outcomes: dict[str, Outcome]) -> tuple[str, int]:
    """A line for each plant, and the exit code."""
    lines, holes = [], []
    for plant in plants:
        outcome = outcomes[plant.name]
        line = f"{plant.name:<40} {outcome.verdict:<10} {outcome.by}"
        if outcome.verdict == "survived" and plant.survives:
            line += f"no bug: {plant.survives}"
        elif outcome.verdict in ("survived", "not judged"):
            holes.append(plant)
        elif plant.survives:
            line += " (remove survives=: a test catches it)"
        lines.append(line)
    lines += [f"{plant.name}: nothing caught it. {plant.why}" for plant in holes]
    lines.append(f"{len(plants) - len(holes)} of {len(plants)} caught or no bugs")
    return "\n".join(lines) + "\n", int(bool(holes))


def main(words: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Return 0 if every plant was caught or has a `survives` reason."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("names", nargs="*", default=["*"], help="names of plants, or globs")
    parser.add_argument("--plants", type=Path, help="TOML file; default tests/plants.toml")
    parser.add_argument("--list", action="store_true", help="list the plants and their tests only")
    parser.add_argument("--tests", nargs="+", default=[], help="override the tests of the rows")
    parser.add_argument("--jobs", type=int, default=1, help="number of plants in parallel")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for a plant's tests")
    parser.add_argument("--json", type=Path, help="write the outcomes to this file")
    parser.add_argument("--draw", type=int, metavar="N", help="print N random mutants of the core")
    parser.add_argument("--seed", type=int, default=0, help="seed of --draw")
    options = parser.parse_args(words)
    if options.draw:
        from draw_mutants import draw, rows

        sys.stdout.write(rows(draw(root / PACKAGE, options.draw, options.seed), options.seed))
        return 0
    try:
        every = read_plants(options.plants or root / "tests" / "plants.toml")
        chosen = [p for p in every if any(fnmatch.fnmatch(p.name, n) for n in options.names)]
        if not chosen:
            raise PlantError(f"No plant matches {' or '.join(options.names)}. See --list.")
        if options.list:
            for name, (file, _, tests) in prepare(root, chosen, options.tests).items():
                sys.stdout.write(f"{name:<40} {file} {' '.join(tests)}\n")
            return 0
        outcomes = run_all(root, chosen, options.tests, options.jobs, options.timeout)
    except PlantError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    if options.json:
        found = [asdict(plant) | asdict(outcomes[plant.name]) for plant in chosen]
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    text, code = report(chosen, outcomes)
    sys.stdout.write(text)
    return code


if __name__ == "__main__":
    sys.exit(main())
