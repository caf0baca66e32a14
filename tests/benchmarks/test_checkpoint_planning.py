"""benchmarks/checkpoint_planning.py with three simulated ranks."""

import sys

import pytest
from commands import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import checkpoint_planning

from titan_dit.models.dit_config import DiTConfig


@pytest.mark.alone
def test_three_ranks_are_planned_once_and_by_torch_alike(monkeypatch):
    small = DiTConfig(
        hidden_size=32,
        num_layers=1,
        num_heads=2,
        patch_size=2,
        latent_size=32,
        in_channels=4,
        num_classes=10,
    )
    monkeypatch.setattr(checkpoint_planning, "DiTConfig", lambda **keys: small)
    rows = checkpoint_planning.simulate("small", 3)
    names = [row["small, 3 ranks, CPU s"].rpartition(",")[0] for row in rows]
    assert names == ["first save", "later saves", "before: every save", "before: every save"]
    first, later, *_ = rows
    assert float(first["all"]) > 0
    assert later["gather"] == "0.00"
    assert first.keys() == later.keys()
