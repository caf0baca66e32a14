import math

import pytest
import torch
from tiny import graphs_alone
from torch import nn

from titan_dit.optim.gradient_norm import clip_norm, compile_scalars
from titan_dit.parallel.compile import num_graphs


@pytest.fixture
def compiled_anew():
    torch._dynamo.reset()
    compile_scalars.cache_clear()
    with graphs_alone():
        yield
    compile_scalars.cache_clear()


def parameters_with(*gradients):
    parameters = []
    for gradient in gradients:
        parameters.append(nn.Parameter(torch.zeros(len(gradient))))
        parameters[-1].grad = torch.tensor(gradient)
    return parameters


def test_gradients_are_scaled_to_the_norm_of_all_together():
    parameters = parameters_with([3.0, 0.0], [0.0, 4.0])
    norm = clip_norm(parameters, max_norm=1.0)
    assert norm.item() == pytest.approx(5)
    assert norm.shape == ()
    assert parameters[0].grad.tolist() == pytest.approx([0.6, 0], rel=1e-5)
    assert parameters[1].grad.tolist() == pytest.approx([0, 0.8], rel=1e-5)


@pytest.mark.parametrize("max_norm", [0.0, 5.1, 100.0])
def test_small_gradients_and_a_limit_of_zero_leave_them_to_the_bit(max_norm):
    parameters = parameters_with([3.0, 0.0], [0.0, 4.0])
    assert clip_norm(parameters, max_norm).item() == pytest.approx(5)
    assert parameters[0].grad.tolist() == [3, 0]
    assert parameters[1].grad.tolist() == [0, 4]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("max_norm", [0.0, 1.0])
def test_one_bad_element_shows_in_the_norm(bad, max_norm):
    norm = clip_norm(parameters_with([1.0, 2.0], [3.0, bad]), max_norm)
    assert not norm.isfinite()


def test_parameters_without_a_gradient_are_left_out():
    parameters = [*parameters_with([3.0, 4.0]), nn.Parameter(torch.ones(2))]
    assert clip_norm(parameters, 1.0).item() == pytest.approx(5)
    assert parameters[1].grad is None


@pytest.mark.parametrize(("max_norm", "factor"), [(0.0, 1.0), (1.0, 0.2), (100.0, 1.0)])
def test_the_loss_scale_is_taken_out_with_and_without_clipping(max_norm, factor):
    parameters = parameters_with([3 * 2.0**20, 0.0], [0.0, 4 * 2.0**20])
    norm = clip_norm(parameters, max_norm, loss_scale=torch.tensor(2.0**20))
    assert norm.item() == pytest.approx(5)
    assert parameters[0].grad.tolist() == pytest.approx([3 * factor, 0], rel=1e-5)
    assert parameters[1].grad.tolist() == pytest.approx([0, 4 * factor], rel=1e-5)


@pytest.mark.usefixtures("compiled_anew")
@pytest.mark.parametrize("max_norm", [0.0, 0.3, 1.0, 1e3])
@pytest.mark.parametrize("scale", [None, 2.0**10])
def test_compiled_scalars_are_those_of_the_formula(max_norm, scale):
    drawn = torch.Generator().manual_seed(0)
    values = [torch.randn(n, generator=drawn).tolist() for n in (1, 7, 30)]
    found, loss_scale = [], None if scale is None else torch.tensor(scale)
    for compiled in (False, True):
        parameters = parameters_with(*values)
        norm = clip_norm(parameters, max_norm, compiled=compiled, loss_scale=loss_scale)
        found.append([norm, *(p.grad for p in parameters)])
    assert all(map(torch.equal, *found))


@pytest.mark.usefixtures("compiled_anew")
def test_the_scalars_take_two_graphs_in_all_steps_together():
    start = num_graphs()
    for _ in range(3):
        clip_norm(parameters_with([3.0, 0.0], [0.0, 4.0]), 1.0, compiled=True)
    assert num_graphs() - start == 2
    # Models that do not use all parameters in every step.
    for count in range(3, 9):
        clip_norm(parameters_with(*[[3.0]] * count), 1.0, compiled=True)
    assert num_graphs() - start <= 6
