"""float8_shapes.py writes the table that the trainer reads; float8_numerics.py finds errors."""

import json
import sys

import torch
from commands import ROOT

from titan_dit.models.dit_config import DiTConfig
from titan_dit.parallel.float8 import LinearShape, read_table

sys.path.insert(0, str(ROOT / "benchmarks"))
import float8_numerics
import float8_shapes
from meter import HostMeter

ROW = {"M": 16, "K": 32, "N": 48, "bf16_ms": 1.0}


def row_of(device, recipe, float8_ms, **more):
    return ROW | {"device": device, "recipe": recipe, "float8_ms": float8_ms, **more}


def test_a_row_replaces_that_of_its_device_recipe_and_shape_alone(tmp_path):
    path = tmp_path / "table.json"
    kept = [("a", "tensorwise", 1.0), ("b", "rowwise", 2.0)]
    kept_rows = [row_of(*row) for row in kept] + [row_of("a", "rowwise", 3.0, M=32)]
    path.write_text(json.dumps({"rows": [row_of("a", "rowwise", 4.0), *kept_rows]}))
    float8_shapes.write([row_of("a", "rowwise", 0.5)], path)
    found = {(m.device, m.recipe, m.shape.rows, m.float8_ms) for m in read_table(path)}
    expected = {(device, recipe, 16, ms) for device, recipe, ms in kept}
    assert found == expected | {("a", "rowwise", 32, 3.0), ("a", "rowwise", 16, 0.5)}
    assert len(json.loads(path.read_text())["rows"]) == 4


class InTurn(HostMeter):
    """A meter that runs a step, returns the next time of a list and logs the order."""

    def __init__(self, spent):
        self.spent, self.order = spent, []

    def call_ms(self, work):
        work()
        self.order.append(work)
        return self.spent.pop(0)


def test_a_shape_is_measured_in_both_formats_in_turn(monkeypatch):
    clock = InTurn([100.0] * 4 + [1.0, 7.0, 9.0, 3.0])
    monkeypatch.setattr(float8_shapes, "meter_of", lambda device: clock)
    shape, cpu = LinearShape(32, 16, 48), torch.device("cpu")
    # bf16 goes first in the third turn and second in the fourth.
    assert float8_shapes.measure(shape, "rowwise", cpu, True, 2) == (2.0, 8.0)
    bf16, fast = clock.order[:2]
    assert clock.order == [bf16, fast, fast, bf16] * 2


def test_layer_errors_are_those_of_three_bits_of_mantissa():
    config = DiTConfig(
        hidden_size=64,
        num_layers=2,
        num_heads=2,
        patch_size=2,
        latent_size=8,
        in_channels=4,
        num_classes=10,
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
        of_weight = float(row["weight gradient %"])
        if row["recipe"] == "rowwise_with_gw_hp":
            assert of_weight < 0.01
        else:
            # A sum over rows that are much alike rounds better than one over random ones.
            assert 0.4 < of_weight / of_gradient < 1.1
