"""benchmarks/loader.py runs, on a dataset that takes no time."""

import json
import sys

from commands import ROOT, run


def test_the_loader_benchmark_compares_every_reader_with_one_npy_per_sample(tmp_path):
    sizes = ("--count", 32, "--channels", 1, "--latent-size", 8, "--batch", 4)
    command = [sys.executable, ROOT / "benchmarks" / "loader.py", *sizes]
    done = run([*command, "--batches", 2, "--turns", 2, "--out", "out.json"], tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["workers"] for row in rows] == [0, 0, 0, 1, 1, 1]
    assert rows[0]["/ one .npy per sample"] == rows[3]["/ one .npy per sample"] == "1.0"
    assert all(float(row["samples/s"].replace(",", "")) > 0 for row in rows)
