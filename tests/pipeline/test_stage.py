"""One stage of a pipeline, without ranks."""

import math

import pytest
import torch
from torch import nn

from titan_dit.config.section import UserError
from titan_dit.execution import scored
from titan_dit.objectives.base import Prepared
from titan_dit.pipeline.pipelined import with_factor
from titan_dit.pipeline.stage import Stage

NAMES = ("full", "split")


class Part(nn.Module):
    """Maps tokens by a weight; passes a condition and a mask on."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, given, side_inputs):
        tokens, condition, mask = given
        return self.linear(tokens).tanh(), condition.view_as(condition), mask


def stream(seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens, condition = torch.randn(2, 3, 4, dtype=torch.float64, generator=generator)
    mask = torch.tensor([0, 1, 1])
    return tokens.requires_grad_(), condition.requires_grad_(), mask


def run(stage, kind, given, gradients, microbatch=0):
    """Forward and backward of one microbatch; returns the gradients of its inputs."""
    stage.keep(microbatch, given, stage.forward(given, {}))
    if kind == "full":
        return stage.backward(microbatch, gradients)
    found = stage.backward_input(microbatch, gradients)
    assert stage.part.linear.weight.grad is None
    stage.backward_weight(microbatch)
    return found


@pytest.mark.parametrize("kind", NAMES)
def test_a_backward_gives_autograds_gradients_and_keeps_nothing(kind):
    part = Part()
    stage = Stage(part, 1, 3, stream())
    gradients = torch.randn(2, 3, 4, dtype=torch.float64).unbind()
    found = run(stage, kind, stream(), gradients)
    tokens, condition, _ = given = stream()
    weights = part.linear.weight.grad, part.linear.bias.grad
    out = part(given, {})
    inputs = tokens, condition, part.linear.weight, part.linear.bias
    expected = torch.autograd.grad(out[:2], inputs, gradients)
    assert len(found) == 2, "one for each floating-point tensor"
    for ours, its in zip((*found, *weights), expected, strict=True):
        assert torch.equal(ours, its)
    assert not stage.kept
    assert not stage.halves


@pytest.mark.parametrize("kind", NAMES)
def test_an_unused_input_has_a_gradient_of_zeros(kind):
    class Unused(Part):
        def forward(self, given, side_inputs):
            tokens, condition, mask = super().forward(given, side_inputs)
            return tokens, torch.ones_like(condition), mask

    stage = Stage(Unused(), 1, 3, stream())
    ones = torch.ones(3, 4, dtype=torch.float64)
    tokens, condition = run(stage, kind, stream(), (ones, ones))
    assert tokens.any()
    assert torch.equal(condition, torch.zeros_like(condition))


def test_the_first_stage_does_its_backward_with_the_weights():
    stage = Stage(Part(), 0, 3, stream())
    given = tuple(tensor.detach() for tensor in stream())
    stage.keep(7, (), stage.forward(given, {}))
    ones = torch.ones(3, 4, dtype=torch.float64)
    assert stage.backward_input(7, (ones, ones)) == ()
    assert stage.part.linear.weight.grad is None
    stage.backward_weight(7)
    assert stage.part.linear.weight.grad.any()


def test_a_stream_of_other_shapes_is_refused():
    tokens, condition, mask = stream()
    stage = Stage(Part(), 1, 3, (tokens, condition[:2], mask))
    with pytest.raises(
        UserError, match=r"stage 1 .* \[3, 4\] float64, \[3, 4\] .* \[2, 4\] float64"
    ):
        stage.forward(stream(), {})


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_shows_in_the_gradients(bad):
    # A gradient can be finite where the loss is not: that of |x| is 1 at infinity.
    target = torch.zeros(2, 4, 3)
    target[1, 0, 0] = bad
    part = Prepared({}, {"velocity": target}, torch.ones(2), total_tokens=8.0)
    prediction = torch.ones(2, 4, 3, requires_grad=True)

    def loss(prediction, targets):
        return (prediction - targets["velocity"]).abs().mean(-1)

    with_factor(*scored(loss, prediction, part)).backward()
    assert not prediction.grad.isfinite().any()
