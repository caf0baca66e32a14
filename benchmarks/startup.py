"""How long until the first step? `python benchmarks/startup.py [--times 3] [--config digits.toml]`.

`--compile`: with compiled blocks, the first time into an empty cache, which the others then find.

The time from the command to the line of its first step, with the environment made already. The
first time is as cold as the machine is; `--drop-caches` (root) makes every time cold.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import time
from pathlib import Path

from report import ROOT, finish


def seconds_to_first_step(config: str, cache: str | None = None) -> float:
    """Start the command, wait for its first step; compiled if `cache` says where results lie."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--training.steps", "1", "--job.dir", folder, "--checkpoint.every", "0"]
        if cache:
            flags += ["--compile.enabled", "true"]
        environment = os.environ | ({"TORCHINDUCTOR_CACHE_DIR": cache} if cache else {})
        began = time.perf_counter()
        command = [str(ROOT / "run_train.sh"), "--config", config, *flags]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert process.stdout
        for line in process.stdout:
            if line.startswith("step "):
                seconds = time.perf_counter() - began
                process.stdout.read()
                process.wait()
                return seconds
    raise SystemExit("the run ended before its first step")


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="digits.toml")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--drop-caches", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--out")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        rows = measured(options, cache if options.compile else None)
    finish(f"startup {options.config}", rows, options.out, compiled=options.compile)


def measured(options: argparse.Namespace, cache: str | None) -> list[dict[str, object]]:
    """One row for every start."""
    rows: list[dict[str, object]] = []
    for number in range(options.times):
        if options.drop_caches:
            subprocess.run(["sync"], check=True)
            Path("/proc/sys/vm/drop_caches").write_text("3")
        seconds = seconds_to_first_step(options.config, cache)
        rows.append({"start": number + 1, "seconds to the first step": f"{seconds:.1f}"})
    return rows


if __name__ == "__main__":
    main()
