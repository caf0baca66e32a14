"""benchmarks/modulation.py: all variants give equal results."""

import sys

import torch
from commands import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import modulation


def test_a_step_is_forward_and_the_gradients_of_all_whatever_the_way():
    condition = torch.ones(2, 3, requires_grad=True)
    weights = [torch.full((4, 3), float(i), requires_grad=True) for i in (1, 2)]
    biases = [torch.zeros(4, requires_grad=True) for _ in range(2)]
    for way in (modulation.layer_by_layer, modulation.one_product):
        of_condition, *others = modulation.step_of(way, condition, weights, biases)()
        # Four outputs of a weight of ones and four of twos; two samples.
        assert of_condition.tolist() == [[12.0] * 3] * 2
        assert [set(g.flatten().tolist()) for g in others] == [{2.0}] * 4
