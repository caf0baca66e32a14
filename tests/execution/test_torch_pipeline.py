"""Our overrides of torch's pipeline runtime, without ranks."""

import math
from types import SimpleNamespace

import pytest
import torch

from titan_dit.execution.pipelined import PipelinedExecutor
from titan_dit.execution.torch_pipeline import Buffers, Runtime
from titan_dit.objectives.base import Prepared


def test_a_loss_is_found_by_its_microbatch_whatever_came_first():
    runtime, last = object.__new__(Runtime), SimpleNamespace(is_last=True)
    runtime.losses, runtime.loss = {}, lambda output, number: output + number
    for number in (2, 0, 1):
        runtime._maybe_compute_loss(last, 10.0, None, number)
    assert [runtime._maybe_get_loss(last, number) for number in range(3)] == [10, 11, 12]
    assert runtime._maybe_get_loss(SimpleNamespace(is_last=False), 0) is None


def test_every_microbatch_is_received_into_a_buffer_of_its_own():
    buffers, pattern = Buffers(), torch.zeros(3, requires_grad=True)
    buffers[0] = (SimpleNamespace(buffer=pattern, name="tokens"), SimpleNamespace(name="constant"))
    received, constant = buffers[1]
    assert received.buffer is not pattern
    assert received.buffer.data_ptr() != pattern.data_ptr()
    assert received.buffer.requires_grad
    assert buffers[2][0].buffer is not received.buffer
    assert (received.name, constant.name) == ("tokens", "constant")
    assert buffers[0][0].buffer is pattern


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_shows_in_the_gradients(bad):
    # A gradient can be finite where the loss is not: that of |x| is 1 at infinity.
    executor = object.__new__(PipelinedExecutor)
    executor.loss = lambda prediction, targets: (prediction - targets["velocity"]).abs().mean(-1)
    target = torch.zeros(2, 4, 3)
    target[1, 0, 0] = bad
    executor.prepared = [Prepared({}, {"velocity": target}, torch.ones(2), total_tokens=8.0)]
    prediction = torch.ones(2, 4, 3, requires_grad=True)
    executor.loss_of(prediction, 0).backward()
    assert not prediction.grad.isfinite().any()
