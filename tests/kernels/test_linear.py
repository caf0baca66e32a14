import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from titan_dit.kernels import linear
from titan_dit.kernels.linear import product, suits_onednn
from titan_dit.models.layers import TokenLinear


def ours_of(inputs, outputs):
    layer = TokenLinear(inputs, outputs)
    linear.apply(layer)
    return layer


def gradients(layer, x, seed):
    x = x.detach().requires_grad_()
    y = layer(x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(seed)))
    return y.detach(), x.grad, layer.weight.grad, layer.bias.grad


@pytest.mark.parametrize("shape", ["contiguous", "transposed", "two dims"])
def test_values_and_gradients_are_those_of_nn_linear(shape):
    torch.manual_seed(0)
    ours, plain = ours_of(24, 40), nn.Linear(24, 40)
    plain.load_state_dict(ours.state_dict())
    x = {
        "contiguous": torch.randn(3, 16, 24),
        "transposed": torch.randn(3, 24, 16).transpose(1, 2),
        "two dims": torch.randn(48, 24),
    }[shape]
    assert suits_onednn(x, ours.weight)
    for found, expected in zip(gradients(ours, x, 1), gradients(plain, x, 1), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_gradient_that_is_not_contiguous_is_taken_as_it_is():
    torch.manual_seed(0)
    ours, plain = ours_of(24, 40), nn.Linear(24, 40)
    plain.load_state_dict(ours.state_dict())
    x, weight = torch.randn(3, 16, 24), torch.randn(3, 40, 16)
    for layer in (ours, plain):
        (layer(x).transpose(1, 2) * weight).sum().backward()
    torch.testing.assert_close(ours.weight.grad, plain.weight.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.bias.grad, plain.bias.grad, rtol=1e-5, atol=1e-5)


def test_the_same_input_gives_the_same_bits():
    layer, x = ours_of(64, 256), torch.randn(4, 16, 64)
    first = gradients(layer, x, 1)
    layer.zero_grad()
    for a, b in zip(first, gradients(layer, x, 1), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_formats_take_torchs_own_way(dtype):
    layer, x = ours_of(24, 40).to(dtype), torch.randn(3, 16, 24, dtype=dtype)
    assert not suits_onednn(x, layer.weight)
    assert layer(x).dtype == dtype


def test_autocast_fake_and_meta_tensors_take_torchs_own_way():
    layer, x = ours_of(24, 40), torch.randn(3, 16, 24)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        assert not suits_onednn(mode.from_tensor(x), layer.weight)
    assert not suits_onednn(x.to("meta"), layer.weight)


def test_without_the_operator_or_onednn_it_is_nn_linear(monkeypatch):
    layer, x = ours_of(24, 40), torch.randn(3, 16, 24)
    with torch.backends.mkldnn.flags(enabled=False):
        assert not suits_onednn(x, layer.weight)
    monkeypatch.setattr(linear.torch.ops, "mkldnn", object())
    assert not suits_onednn(x, layer.weight)
    assert layer(x).shape == (3, 16, 40)


@pytest.mark.parametrize("shape", [(3, 16, 24), (48, 24)])
def test_a_compiled_product_calls_onednn_forward_and_backward(shape):
    torch.manual_seed(0)
    called, drawn = [], [torch.randn(size) for size in (shape, (40, 24), (40,))]

    def graph_of(graph, _):
        called.append([str(n.target) for n in graph.graph.nodes if n.op == "call_function"])
        return make_boxed_func(graph.forward)

    def found(function):
        given = [tensor.clone().requires_grad_() for tensor in drawn]
        y = function(*given)
        y.square().sum().backward()
        return [y.detach(), *(tensor.grad for tensor in given)]

    compiled = torch.compile(product, backend=aot_autograd(fw_compiler=graph_of), fullgraph=True)
    for ours, expected in zip(found(compiled), found(product), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)
    assert [names.count("titan_dit.linear.default") for names in called] == [1, 1]
