"""Copies of the weights in bf16, on one rank."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from titan_dit.parallel import compute_copies


class Net(nn.Module):
    """A table that is also the head, a recomputed layer, a frozen one and one without use."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Linear(8, 8, bias=False)
        self.inner = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.unused = nn.Linear(2, 2)
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.table.weight
        self.seen = []

    def forward(self, x):
        hidden = self.table(x.to(self.table.weight.dtype))
        hidden = checkpoint(self.recomputed, hidden, use_reentrant=False)
        return self.head(self.frozen(hidden)), hidden.sum()

    def recomputed(self, x):
        self.seen.append(self.inner.weight.dtype)
        return self.inner(x).tanh()


def prepared(dtype=torch.bfloat16, keep=False):
    net = Net()
    compute_copies.apply(net, dtype, keep)
    return net


def loss_of(net, seed):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
    out, total = net(x)
    return out.float().square().mean() + total.float()


def gradients(net):
    return {name: p.grad for name, p in net.named_parameters()}


def expected(seeds):
    """Gradients of a network in bf16, summed in fp32."""
    found = {}
    for seed in seeds:
        net = Net().to(torch.bfloat16)
        loss_of(net, seed).backward()
        for name, gradient in gradients(net).items():
            if gradient is not None:
                found[name] = found.get(name, 0) + gradient.float()
    return found


def check(net, seeds):
    """The gradients are as expected, and the modules hold fp32 weights."""
    wanted = expected(seeds)
    assert wanted.keys() == {"table.weight", "inner.weight", "inner.bias"}
    for name, gradient in gradients(net).items():
        if name in wanted:
            assert gradient.dtype == torch.float32
            assert torch.equal(gradient, wanted[name]), name
        else:
            assert gradient is None, name
    assert all(p.dtype == torch.float32 for p in net.parameters())
    assert net.head.weight is net.table.weight


@pytest.mark.parametrize("chunk", [1, 100, 2**25])
def test_microbatches_add_to_fp32_gradients(monkeypatch, chunk):
    monkeypatch.setattr(compute_copies, "CHUNK", chunk)
    net = prepared()
    for seed in (1, 2, 3):
        loss_of(net, seed).backward()
    check(net, (1, 2, 3))
    assert set(net.seen) == {torch.bfloat16}
    assert len(net.seen) == 6  # Each was recomputed.


def test_graphs_may_wait_for_their_backward():
    net = prepared()
    losses = [loss_of(net, seed) for seed in (1, 2, 3)]
    with torch.no_grad():
        loss_of(net, 4)
    for loss in losses[:2]:
        loss.backward()
    losses[2].backward()
    check(net, (1, 2, 3))


def test_two_forwards_may_share_a_backward():
    net = prepared()
    (loss_of(net, 1) + loss_of(net, 2)).backward()
    # Both add to one gradient in bf16, as without copies.
    alone = Net().to(torch.bfloat16)
    (loss_of(alone, 1) + loss_of(alone, 2)).backward()
    for name, gradient in gradients(alone).items():
        own = gradients(net)[name]
        assert (own is None) == (gradient is None)
        assert own is None or torch.equal(own, gradient.float())


def test_a_forward_sees_every_change_of_the_weights():
    net = prepared()
    with torch.no_grad():
        before = loss_of(net, 1)
        net.inner.weight.mul_(2)
        changed = loss_of(net, 1)
        net.inner.weight.data.div_(2)
        assert loss_of(net, 1) == before != changed
    assert net.inner.weight.dtype == torch.float32
    # The graph of a forward whose backward never comes.
    weight = net.inner.weight
    loss_of(net, 1)
    with torch.no_grad():
        weight.mul_(2)
        assert loss_of(net, 1) == changed
        weight.div_(2)
    loss_of(net, 1).backward()
    check(net, (1,))


def test_a_failed_forward_leaves_a_network_that_works():
    net = prepared()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        net(torch.randn(4, 9))
    loss_of(net, 1).backward()
    check(net, (1,))


def test_a_failed_backward_leaves_no_gradients():
    net = prepared()

    def fail(_):
        raise ValueError("in a hook")

    out, total = net(torch.randn(4, 8))
    total.register_hook(fail)
    with pytest.raises(ValueError, match="in a hook"):
        (out.sum() + total).backward()
    loss_of(net, 1).backward()
    check(net, (1,))


def test_a_second_backward_is_refused_and_changes_nothing_later():
    net = prepared()
    weights = list(net.parameters())
    loss = loss_of(net, 2)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    for weight in weights:
        weight.grad = None
    loss_of(net, 1).backward()
    check(net, (1,))


@pytest.mark.parametrize("keep", [False, True])
def test_copies_take_memory_only_in_use_unless_they_keep_their_addresses(keep):
    net = prepared(keep=keep)
    seen = []
    hook = net.inner.register_forward_hook(lambda inner, *_: seen.append(inner.weight))
    with torch.no_grad():
        loss_of(net, 1)
    loss_of(net, 1).backward()
    assert len(seen) == 3  # One was recomputed.
    copy = seen[0]
    assert all(one is copy for one in seen)
    assert (copy.untyped_storage().nbytes() > 0) == keep
    address = copy.data_ptr()
    hook.remove()
    loss = loss_of(net, 1)
    assert not keep or copy.data_ptr() == address
    assert copy.untyped_storage().nbytes() > 0
    loss.backward()


def test_a_graph_may_wait_while_others_run():
    net = prepared()
    first, second = loss_of(net, 1), loss_of(net, 2)
    first.backward()
    with torch.no_grad():
        loss_of(net, 3)
    loss_of(net, 3).backward()
    second.backward()
    check(net, (1, 3, 2))


def test_hooks_of_parameters_see_the_gradients_of_the_weights():
    net, seen = prepared(), []
    net.inner.bias.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad))
    loss_of(net, 1).backward()
    assert [id(gradient) for gradient in seen] == [id(net.inner.bias.grad)]
    check(net, (1,))


def test_a_parameter_may_be_frozen_later():
    net = prepared()
    loss_of(net, 1).backward()
    net.inner.weight.requires_grad_(False).grad = None
    loss_of(net, 2).backward()
    assert net.inner.weight.grad is None
    assert net.inner.bias.grad is not None


def test_the_first_forward_may_be_in_inference_mode():
    net = prepared()
    with torch.inference_mode():
        loss_of(net, 1)
    loss_of(net, 1).backward()
    check(net, (1,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_formats_need_no_copies_and_leave_buffers(dtype):
    net = Net()
    net.register_buffer("turns", torch.tensor([1 + 2j]))
    net.register_buffer("wide", torch.zeros(1, dtype=torch.float64))
    compute_copies.apply(net, dtype, keep=False)
    assert (net.turns.dtype, net.wide.dtype) == (torch.complex64, torch.float64)
    assert all(p.dtype == dtype for p in net.parameters())
    weight = net.inner.weight
    loss_of(net, 1)
    assert net.inner.weight is weight


def test_bytes_of_a_quantized_weight_stay_bytes():
    net = Net()
    held = nn.Parameter(torch.arange(8, dtype=torch.uint8), requires_grad=False)
    net.held = held
    compute_copies.apply(net, torch.bfloat16, False)
    net.register_forward_hook(lambda *_: net.seen.append(net.held))
    loss_of(net, 0).backward()
    assert any(seen is held for seen in net.seen)
