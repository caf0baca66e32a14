import math

import pytest
import torch
from torch import nn

from titan_dit.execution import LocalExecutor
from titan_dit.objectives.base import Prepared


class Toy(nn.Module):
    """The smallest network that the executor can run."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 3)
        self.calls = []

    def forward(self, inputs, static):
        self.calls.append(len(inputs["tokens"]))
        return self.layer(inputs["tokens"]) + static["positions"]


def square(prediction, targets):
    return (prediction - targets["velocity"]).square().mean(-1)


def prepared(rows=6, weight=None):
    generator = torch.Generator().manual_seed(1)
    weight = torch.ones(rows) if weight is None else torch.tensor(weight)
    return Prepared(
        inputs={"tokens": torch.randn(rows, 4, 3, generator=generator)},
        static={"positions": torch.randn(4, 3, generator=generator)},
        targets={"velocity": torch.randn(rows, 4, 3, generator=generator)},
        weight=weight,
        total_tokens=weight.sum().item() * 4,
    )


def step(size, batch):
    model = Toy()
    loss = LocalExecutor(model, square, size).step(batch)
    return model, loss


@pytest.mark.parametrize(("size", "calls"), [(None, [6]), (1, [1] * 6), (2, [2] * 3), (4, [4, 2])])
def test_loss_and_gradients_do_not_depend_on_the_microbatch_size(size, calls):
    batch = prepared()
    model, loss = step(size, batch)
    expected = Toy()
    mean = square(expected(batch.inputs, batch.static), batch.targets).mean()
    mean.backward()
    assert model.calls == calls
    torch.testing.assert_close(loss, mean.detach())
    assert not loss.requires_grad
    torch.testing.assert_close(model.layer.weight.grad, expected.layer.weight.grad)
    torch.testing.assert_close(model.layer.bias.grad, expected.layer.bias.grad)


@pytest.mark.parametrize("size", [None, 2])
def test_a_row_of_weight_zero_counts_for_nothing(size):
    whole, padded = prepared(4), prepared(6, [1.0, 1, 1, 1, 0, 0])
    for name in ("inputs", "targets"):
        for key, values in getattr(whole, name).items():
            getattr(padded, name)[key][:4] = values
    padded.static["positions"].copy_(whole.static["positions"])
    (model, loss), (expected, expected_loss) = step(size, padded), step(size, whole)
    torch.testing.assert_close(loss, expected_loss)
    torch.testing.assert_close(model.layer.weight.grad, expected.layer.weight.grad)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("size", [None, 2])
def test_a_loss_that_is_not_finite_shows_in_the_gradients(bad, size):
    # A gradient can be finite where the loss is not: that of |x| is 1 at infinity.
    batch = prepared()
    batch.targets["velocity"][5, 0, 0] = bad

    def absolute(prediction, targets):
        return (prediction - targets["velocity"]).abs().mean(-1)

    model = Toy()
    loss = LocalExecutor(model, absolute, size).step(batch)
    assert not loss.isfinite()
    assert not model.layer.weight.grad.isfinite().all()


def test_predicting_runs_forward_only_in_fp32():
    model, batch = Toy().bfloat16(), prepared()
    inputs = {"tokens": batch.inputs["tokens"].bfloat16()}
    prediction = LocalExecutor(model, square, 2).predict(inputs, batch.static)
    assert prediction.dtype == torch.float32
    assert not prediction.requires_grad
    # No more samples at a time than in training, although guidance doubles them.
    assert model.calls == [2, 2, 2]
    model.calls.clear()
    whole = LocalExecutor(model, square, None).predict(inputs, batch.static)
    assert model.calls == [6]
    assert torch.equal(whole, prediction)
