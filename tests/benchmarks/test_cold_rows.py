"""benchmarks/cold_rows.py on a few rows."""

import sys

import torch
from commands import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import cold_rows

from titan_dit.data.latents import LatentShards


def test_both_readers_read_the_same_rows_and_cold_is_cold(tmp_path):
    before, now = cold_rows.measure_cold(tmp_path / "set", (1, 4, 4), 64, 8, 1)
    assert [before["reads"], now["reads"]] == list(cold_rows.READERS)
    assert before["cold / before"] == "1.0"
    rows = [5, 3, 4, 60, 0, 0]
    mapped = cold_rows.mapped(LatentShards(tmp_path / "set")).read(rows)
    assert torch.equal(mapped["latent"], LatentShards(tmp_path / "set").read(rows)["latent"])


def test_the_share_of_cached_pages_is_the_kernels(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(10 << 12))
    path.read_bytes()
    assert cold_rows.cached_share([path]) == 1.0
    cold_rows.evict([path])
    # A file system in memory keeps what it has.
    assert cold_rows.cached_share([path]) in (0.0, 1.0)
