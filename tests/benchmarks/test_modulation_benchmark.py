"""benchmarks/modulation.py: the ways it times give the same, and each goes first equally often."""

import json
import sys

import pytest
import torch
from commands import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import modulation
from meter import HostMeter


def test_every_way_gives_the_same_shifts_and_scales():
    draw = torch.Generator().manual_seed(0)
    condition = torch.randn(3, 8, generator=draw)
    weights = [torch.randn(48, 8, generator=draw) for _ in range(4)]
    biases = [torch.randn(48, generator=draw) for _ in range(4)]
    apart = modulation.layer_by_layer(condition, weights, biases)
    together = modulation.one_product(condition, weights, biases)
    [joined] = modulation.joined_before(condition, [torch.cat(weights)], [torch.cat(biases)])
    torch.testing.assert_close(together, apart)
    torch.testing.assert_close(joined, torch.cat(apart, -1))


def test_a_step_is_forward_and_the_gradients_of_all():
    condition = torch.ones(2, 3, requires_grad=True)
    weights = [torch.full((4, 3), float(i), requires_grad=True) for i in (1, 2)]
    biases = [torch.zeros(4, requires_grad=True) for _ in range(2)]
    for way in (modulation.layer_by_layer, modulation.one_product):
        of_condition, *others = modulation.step_of(way, condition, weights, biases)()
        # Four outputs of a weight of ones and four of twos; two samples.
        assert of_condition.tolist() == [[12.0] * 3] * 2
        assert [set(g.flatten().tolist()) for g in others] == [{2.0}] * 4


class Noted(HostMeter):
    """Every call takes as many milliseconds as calls went before it."""

    def __init__(self):
        self.order = []

    def call_ms(self, work):
        work()
        self.order.append(work)
        return float(len(self.order) - 1)


def test_every_way_goes_first_equally_often(monkeypatch):
    clock = Noted()
    monkeypatch.setattr(modulation, "meter_of", lambda device: clock)
    found = modulation.measure(16, 2, 4, torch.device("cpu"), 3)
    a, b, c = clock.order[:3]
    assert clock.order == [a, b, c, b, c, a, c, a, b, a, b, c]
    assert found == {
        "layer by layer": [5.0, 7.0, 9.0],
        "one product": [3.0, 8.0, 10.0],
        "joined before": [4.0, 6.0, 11.0],
    }


def test_the_table_has_a_row_per_size(monkeypatch, tmp_path):
    monkeypatch.setitem(modulation.SIZES, "S", (16, 2, 2))
    out = tmp_path / "out.json"
    flags = ["--sizes", "S", "--batch", "2", "--turns", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["modulation.py", *flags])
    modulation.main()
    [row] = json.loads(out.read_text())["rows"]
    assert (row["size"], row["layers"], row["layer by layer, ratio"]) == ("S", 2, "1.00")
    one, base = float(row["one product, ms"]), float(row["layer by layer, ms"])
    assert float(row["one product, ratio"]) == pytest.approx(one / base, rel=0.1)
