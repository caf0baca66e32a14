"""Time to first step: `python benchmarks/startup.py [--times 3] [--config digits.toml]`.

Seconds from the command to the console line of its first step, with .venv already made. The first
repeat is as cold as the machine; `--drop-caches` (root) makes every repeat cold.

`--compile [--size S/2]`: seconds from process start to the end of its first step in fp32: eager,
compiled blocks with a cold cache and with a warm one, and the whole model compiled with a cold
cache. Medians over `--times`; "compiling" subtracts the eager time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from report import ROOT, finish

CASES = {"eager": "eager", "blocks": "blocks", "blocks, warm cache": "blocks", "whole": "whole"}
"""Variants in order of measurement; the second "blocks" finds a warm cache."""


def seconds_to_first_step(command: Sequence[str], cache: str | None = None) -> float:
    """Start the command; return the seconds until its first step line."""
    environment = os.environ | ({"TORCHINDUCTOR_CACHE_DIR": cache} if cache else {})
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout
    for line in process.stdout:
        if line.startswith("step "):
            seconds = time.perf_counter() - began
            process.stdout.read()
            process.wait()
            return seconds
    raise SystemExit("the run ended before its first step: see its errors above")


def command_rows(options: argparse.Namespace) -> list[dict[str, object]]:
    """One row per repeat of the user's command."""
    rows: list[dict[str, object]] = []
    for number in range(options.times):
        if options.drop_caches:
            subprocess.run(["sync"], check=True)
            Path("/proc/sys/vm/drop_caches").write_text("3")
        with tempfile.TemporaryDirectory() as folder:
            flags = ["--training.steps", "1", "--job.dir", folder, "--checkpoint.every", "0"]
            command = [str(ROOT / "run_train.sh"), "--config", options.config, *flags]
            seconds = seconds_to_first_step(command)
        rows.append({"start": number + 1, "seconds to the first step": f"{seconds:.1f}"})
    return rows


def compile_rows(options: argparse.Namespace) -> list[dict[str, object]]:
    """One row per variant, each in its own process: medians over `--times`."""
    seconds: dict[str, list[float]] = {name: [] for name in CASES}
    shape = ["--size", options.size, "--batch", str(options.batch)]
    command = [sys.executable, __file__, *shape, "--first-step"]
    seconds_to_first_step([*command, "eager"])  # Warms the page cache with torch's libraries.
    for _ in range(options.times):
        with tempfile.TemporaryDirectory() as folder:
            for name, how in CASES.items():
                seconds[name].append(seconds_to_first_step([*command, how], f"{folder}/{how}"))
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    rows: list[dict[str, object]] = []
    for name, spent in medians.items():
        compiling, whole = (medians[n] - medians["eager"] for n in (name, "whole"))
        rows.append(
            {
                "compiled": name,
                "seconds to the end of the first step": f"{spent:.1f}",
                "compiling": f"{compiling:.1f}",
                "/ whole": f"{compiling / whole:.2f}",
            }
        )
    return rows


def first_step(how: str, size: str, batch: int) -> None:
    """Build a model, take one step and print its line."""
    import step
    import torch

    from titan_dit.config.layout import CompileConfig
    from titan_dit.models.dit_config import DiTConfig
    from titan_dit.parallel import compile

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if how == "blocks":
        compile.check(CompileConfig(enabled=True), device)  # As the trainer does.
    ways = {"eager": step.eager, "blocks": step.blocks, "whole": lambda model: model.compile()}
    config = DiTConfig(size=size, latent_size=32, in_channels=4, num_classes=1000)
    loss = step.ours(config, batch, device, ways[how])().item()
    print(f"step 1 loss {loss:.4f}", flush=True)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="digits.toml")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--drop-caches", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--size", default="S/2")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--first-step", choices=["eager", "blocks", "whole"])
    parser.add_argument("--out")
    options = parser.parse_args()
    if options.first_step:
        first_step(options.first_step, options.size, options.batch)
    elif options.compile:
        title = f"startup, compiling {options.size} batch {options.batch}"
        finish(title, compile_rows(options), options.out)
    else:
        finish(f"startup {options.config}", command_rows(options), options.out)


if __name__ == "__main__":
    main()
