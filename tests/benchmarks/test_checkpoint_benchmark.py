"""benchmarks/checkpoint.py on a small state."""

import sys

import torch
from commands import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import checkpoint

from titan_dit.models.dit_config import DiTConfig


def test_the_state_is_all_that_adamw_and_one_average_keep(monkeypatch, tmp_path):
    small = {"hidden_size": 32, "num_layers": 2, "num_heads": 2}
    monkeypatch.setitem(checkpoint.MODELS, "30 MiB", small)
    row = checkpoint.measure("30 MiB", tmp_path, 1, torch.device("cpu"))
    config = DiTConfig(patch_size=2, latent_size=32, in_channels=4, num_classes=1000, **small)
    sizes = [p.numel() for p in config.build(4).parameters()]
    # Weight, two moments, EMA and a step count, all in fp32.
    assert row["tensors"] == 5 * len(sizes)
    assert row["state"] == f"{(16 * sum(sizes) + 4 * len(sizes)) / 2**20:,.0f} MiB"
    # With one turn the median is the ratio itself, up to rounding.
    wait, copy = float(row["async wait ms"]), float(row["one copy ms"])
    lowest, highest = (wait - 0.05) / (copy + 0.05), (wait + 0.05) / max(copy - 0.05, 1e-3)
    assert lowest - 0.01 <= float(row["wait / copy"]) <= highest + 0.01
