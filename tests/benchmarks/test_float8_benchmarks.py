"""The table that one writes is the table that the trainer reads; the other's errors are errors."""

import json
import sys

import torch
from commands import ROOT

from titan_dit.models.dit import DiTConfig
from titan_dit.parallel.float8_gains import Shape, read_table

sys.path.insert(0, str(ROOT / "benchmarks"))
import float8_numerics
import float8_shapes


def test_rows_of_a_device_replace_those_it_had(tmp_path):
    path = tmp_path / "table.json"
    row = {"recipe": "rowwise", "M": 16, "K": 32, "N": 48, "bf16_ms": 1.0, "float8_ms": 2.0}
    old = [row | {"device": "a"}, row | {"device": "b"}]
    path.write_text(json.dumps({"rows": old}))
    float8_shapes.write([row | {"device": "a", "float8_ms": 0.5}], path)
    assert {(m.device, m.float8_ms) for m in read_table(path)} == {("a", 0.5), ("b", 2.0)}


def test_a_shape_is_measured_in_both_formats(monkeypatch):
    monkeypatch.setattr(float8_shapes, "milliseconds", lambda step, device: step() or 7.0)
    shape, cpu = Shape(32, 16, 48), torch.device("cpu")
    assert float8_shapes.measure(shape, "rowwise", cpu, True, 1) == (7.0, 7.0)


def test_layer_errors_are_those_of_three_bits_of_mantissa():
    config = DiTConfig(
        hidden=64, layers=2, heads=2, patch=2, latent_size=8, channels=4, num_classes=10
    )
    rows = float8_numerics.layer_errors(config, torch.device("cpu"), emulate=True)
    assert len(rows) == 12
    for row in rows:
        # Rounding to e4m3 is off by 2.6% rms, to e5m2 by 5.2%; a product has two rounded factors,
        # which small models, whose rows are much alike, miss by a fifth either way or more.
        is_e5m2 = row["recipe"] == "tensorwise"
        of_gradient = (2.6**2 + 5.2**2) ** 0.5 if is_e5m2 else 2.6 * 2**0.5
        assert 0.6 < float(row["output %"]) / (2.6 * 2**0.5) < 1.1
        assert 0.6 < float(row["input gradient %"]) / of_gradient < 1.25
        if row["recipe"] == "rowwise_with_gw_hp":
            assert float(row["weight gradient %"]) < 0.01
