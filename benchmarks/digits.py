"""Sample quality on digits: `python benchmarks/digits.py [--seconds 60] [--run DIR] [--out JSON]`.

Trains the default run for a given time, with the lr schedule fitted to it, and draws 500 samples
from the EMA weights at guidance 2. Two metrics: the agreement of their labels with a
3-nearest-neighbour classifier fitted on all real digits, and the standard deviation within a class,
relative to that of real digits. `--run DIR` evaluates an existing run instead.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from report import ROOT, finish
from safetensors.torch import load_file
from sklearn.neighbors import KNeighborsClassifier

from titan_dit.data.sections import Digits

NUM_SAMPLES, CFG_SCALE, SAMPLER_STEPS = 500, 2.0, 25


def train(folder: Path, steps: int) -> float:
    """Train digits.toml for `steps` steps into `folder`; return the seconds spent in steps."""
    flags = ["--training.steps", steps, "--sampling.every", 0, "--checkpoint.every", steps]
    # The first step is logged on its own, because it includes one-time set-up.
    command = [ROOT / "run_train.sh", "--config", "digits.toml", "--job.dir", folder, *flags]
    subprocess.run([str(word) for word in command], check=True, stdout=sys.stderr)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    before = [0] + [row["step"] for row in rows]
    taken = [row["step"] - last for row, last in zip(rows, before, strict=False)]
    return sum(row["step_ms"] * n for row, n in zip(rows, taken, strict=True)) / 1e3


def fit_steps(seconds: float, folder: Path) -> int:
    """Number of steps that this machine takes in `seconds`."""
    steps = 100
    return round(seconds / train(folder / "calibration", steps) * steps)


def judge(run: Path) -> dict[str, object]:
    """Draw samples and compare them with the real digits."""
    out = run / "benchmark.safetensors"
    command = [sys.executable, "-m", "titan_dit", "sample", "--run", run, "--out", out]
    command += ["--num", NUM_SAMPLES, "--cfg-scale", CFG_SCALE, "--steps", SAMPLER_STEPS]
    subprocess.run([str(word) for word in command], check=True, stdout=sys.stderr, cwd=ROOT)
    drawn = load_file(out)
    digits = Digits().open()
    whole = digits.read(range(len(digits)))
    real, real_labels = whole["latent"].float().flatten(1).numpy(), whole["label"].numpy()
    samples, labels = drawn["samples"].flatten(1).numpy(), drawn["labels"].numpy()

    classifier = KNeighborsClassifier(3).fit(real, real_labels)
    agreement = (classifier.predict(samples) == labels).mean()
    spread = within_class_std(torch.from_numpy(samples), torch.from_numpy(labels))
    real_spread = within_class_std(torch.from_numpy(real), torch.tensor(real_labels))
    return {
        "3-NN agreement": f"{agreement:.3f}",
        "within-class std": f"{spread:.3f}",
        "of the real": f"{spread / real_spread:.2f}",
    }


def within_class_std(samples: torch.Tensor, labels: torch.Tensor) -> float:
    """Standard deviation per pixel within a class, mean over pixels and classes."""
    classes = labels.unique()
    parts = [samples[labels == label].std(0, correction=0).mean() for label in classes]
    return float(torch.stack(parts).mean())


def main() -> None:
    """Train (or load a run), evaluate, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--out")
    options = parser.parse_args()
    if options.run:
        finish("digits", [{"run": str(options.run), **judge(options.run)}], options.out)
        return
    with tempfile.TemporaryDirectory() as folder:
        steps = fit_steps(options.seconds, Path(folder))
        began = time.perf_counter()
        run = Path(folder) / "run"
        trained = train(run, steps)
        row = {
            "steps": steps,
            "seconds in steps": f"{trained:.1f}",
            "seconds of the command": f"{time.perf_counter() - began:.1f}",
            **judge(run),
        }
        finish("digits", [row], options.out)


if __name__ == "__main__":
    main()
