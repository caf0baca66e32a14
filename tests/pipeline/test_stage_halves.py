"""Both halves of a backward give the gradients of the whole one, at its cost."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from titan_dit.pipeline.stage import split_backward


class Product(torch.autograd.Function):
    """A matmul whose node is Python: autograd owns it weakly."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


class Net(nn.Module):
    """Norms, a split, a shared weight, a Python node, weights alone, an unused weight."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.product, self.unused = (nn.Parameter(torch.randn(6, 6)) for _ in range(2))
        self.scale, self.frozen = (nn.Parameter(torch.randn(6)) for _ in range(2))
        self.frozen.requires_grad_(False)
        self.double()

    def forward(self, x, condition):
        left, right = self.first(x).chunk(2, -1)
        x = self.norm(torch.cat((right, left.tanh()), -1) + condition)
        x = Product.apply(self.second(self.first(x).sin()), self.product)
        return x + self.frozen * self.scale, condition * self.second.bias, self.scale.exp()


def problem(seed=0):
    torch.manual_seed(seed)
    net = Net()
    inputs = [torch.randn(5, 6, dtype=torch.float64).requires_grad_() for _ in range(2)]
    return net, inputs


def gradients_like(outputs):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(t.shape, dtype=t.dtype, generator=generator) for t in outputs]


def learning(net):
    return [weight for weight in net.parameters() if weight.requires_grad]


@pytest.mark.parametrize("times", [1, 3])
def test_two_halves_give_the_gradients_of_the_whole(times):
    net, inputs = problem()
    outputs = net(*inputs)
    wanted = [*inputs, *learning(net)]
    whole = torch.autograd.grad(outputs, wanted, gradients_like(outputs), allow_unused=True)
    for _ in range(times):
        outputs = net(*inputs)
        given = gradients_like(outputs)
        found, half = split_backward(outputs, given, inputs, net.parameters())
        assert times > 1 or all(weight.grad is None for weight in net.parameters())
        del outputs  # The halves alone must keep the graph.
        gc.collect()
        half.run()
    torch.testing.assert_close(found, whole[:2], rtol=1e-12, atol=1e-12)
    assert net.unused.grad is None
    for weight, its in zip(learning(net), whole[2:], strict=True):
        if weight is not net.unused:
            torch.testing.assert_close(weight.grad, times * its, rtol=1e-12, atol=1e-12)


def test_a_loss_has_a_gradient_of_one():
    net, inputs = problem()
    loss = sum(output.sum() for output in net(*inputs))
    found, half = split_backward([loss], None, inputs, net.parameters())
    half.run()
    ours = [weight.grad for weight in learning(net) if weight is not net.unused]
    net.zero_grad()
    sum(output.sum() for output in net(*inputs)).backward()
    torch.testing.assert_close(found, tuple(tensor.grad for tensor in inputs))
    its = [weight.grad for weight in learning(net) if weight is not net.unused]
    torch.testing.assert_close(ours, its)


def test_an_unused_input_has_no_gradient():
    net, inputs = problem()
    out = net.first(inputs[0])
    (found, missing), _ = split_backward([out], gradients_like([out]), inputs, net.parameters())
    assert found.any()
    assert missing is None


def chain():
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
    return layers, torch.randn(8, 16).requires_grad_()


def test_each_half_does_half_of_the_work():
    layers, x = chain()
    with FlopCounterMode(display=False) as forward:
        out = layers(x)
    with FlopCounterMode(display=False) as first:
        _, half = split_backward([out], [torch.ones_like(out)], [x], layers.parameters())
    with FlopCounterMode(display=False) as second:
        half.run()
    flops = forward.get_total_flops()
    assert [first.get_total_flops(), second.get_total_flops()] == [flops, flops]


class Noted(torch.autograd.Function):
    """The identity; keeps an object for its backward."""

    @staticmethod
    def forward(ctx, x, kept):
        ctx.kept = kept
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def test_the_second_half_frees_the_graph():
    layers, x = chain()
    kept = nn.Module()
    alive = weakref.ref(kept)
    out = layers(Noted.apply(layers[0](x), kept))
    del kept
    _, half = split_backward([out], [torch.ones_like(out)], [x], layers.parameters())
    del out
    half.run()
    assert alive() is not None
    del half
    assert alive() is None, "only the collector would find it"
