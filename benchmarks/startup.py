"""How long until the first step? `python benchmarks/startup.py [--times 3] [--config digits.toml]`.

The time from the command to the line of its first step, with the environment made already. The
first time is as cold as the machine is; `--drop-caches` (root) makes every time cold.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
from pathlib import Path

from report import ROOT, finish


def seconds_to_first_step(config: str) -> float:
    """Start the command, wait for its first step."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--training.steps", "1", "--job.dir", folder, "--checkpoint.every", "0"]
        began = time.perf_counter()
        command = [str(ROOT / "run_train.sh"), "--config", config, *flags]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
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
    parser.add_argument("--out")
    options = parser.parse_args()
    rows = []
    for number in range(options.times):
        if options.drop_caches:
            subprocess.run(["sync"], check=True)
            Path("/proc/sys/vm/drop_caches").write_text("3")
        seconds = seconds_to_first_step(options.config)
        rows.append({"start": number + 1, "seconds to the first step": f"{seconds:.1f}"})
    finish(f"startup {options.config}", rows, options.out)


if __name__ == "__main__":
    main()
