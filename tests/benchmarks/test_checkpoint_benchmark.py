"""benchmarks/checkpoint.py on a small state."""

import json
import sys

from commands import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import checkpoint

from titan_dit.models.dit import DiTConfig


def test_a_row_says_what_the_state_weighs_and_what_saving_it_takes(monkeypatch, tmp_path):
    small = {"hidden": 32, "layers": 2, "heads": 2}
    monkeypatch.setitem(checkpoint.MODELS, "30 MiB", small)
    out = tmp_path / "out.json"
    flags = ["--states", "30 MiB", "--turns", "2", "--folder", str(tmp_path), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["checkpoint.py", *flags])
    checkpoint.main()
    [row] = json.loads(out.read_text())["rows"]
    config = DiTConfig(patch=2, latent_size=32, channels=4, num_classes=1000, **small)
    sizes = [p.numel() for p in config.build(4).parameters()]
    # Weight, two moments and an average in fp32, and a step count, fp32 too.
    assert row["tensors"] == 5 * len(sizes)
    assert row["state"] == f"{(16 * sum(sizes) + 4 * len(sizes)) / 2**20:,.0f} MiB"
    times = [float(row[key].replace(",", "")) for key in row if key.endswith(" ms")]
    assert len(times) == 5
    assert min(times[1:]) >= 0
    whole, wait = float(row["async until whole ms"].replace(",", "")), float(row["async wait ms"])
    assert whole >= wait - 1  # rounded to a millisecond
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
