"""Adapters over a quantised base reach the loss of those over full weights: the digits, turned."""

import json
import sys
from pathlib import Path

import pytest
from commands import run
from safetensors.torch import load_file

import titan_dit
from titan_dit.data.latents import write_shards

pytestmark = [pytest.mark.long, pytest.mark.process]

LIMITS = {"int8": 0.005, "float8": 0.005, "nf4": 0.02}
"""How much larger the loss may be than over full weights."""
LAST = 100
"""Steps over which losses are averaged. All runs have the same samples, times and noise."""
STEPS = "--training.steps 300 --metrics.every 1 --sampling.every 0 --checkpoint.every 300"


def train(folder, name, flags):
    """Train a run of the digits; return its mean loss over the last steps."""
    words = f"-m titan_dit.train --config digits.toml --job.name {name} {flags}"
    done = run([sys.executable, *words.split()], folder, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (folder / f"outputs/{name}/metrics.jsonl").open()]
    losses = [row["loss"] for row in rows if "loss" in row][-LAST:]
    return sum(losses) / len(losses)


@pytest.mark.timeout(2400)
def test_adapters_over_codes_reach_the_loss_of_those_over_full_weights(tmp_path):
    file = Path(titan_dit.__file__).parent / "data/digits/digits-00000.safetensors"
    digits = load_file(file)
    turned = digits["latent"].rot90(1, (2, 3)).contiguous()
    write_shards(tmp_path / "turned", turned, digits["label"], num_classes=10, source="a test")
    train(tmp_path, "digits", STEPS.replace("300", "600"))
    flags = (
        f"{STEPS} --data.name latents --data.path turned --checkpoint.init outputs/digits "
        "--precision.dtype bf16 --lora.rank 8 --optimizer.lr 1e-2"
    )
    full = train(tmp_path, "full", flags)
    found = {b: train(tmp_path, b, f"{flags} --lora.base {b}") / full - 1 for b in LIMITS}
    print(f"full {full:.4f}", found)
    before = train(tmp_path, "short", flags.replace("steps 300", f"steps {LAST}"))
    assert full < 0.9 * before  # The adapters have learned.
    assert all(abs(found[base]) <= most for base, most in LIMITS.items()), found
