"""The optimizers of examples/ that are more than element by element."""

import math

import pytest
import torch
from torch import nn

from examples.adafactor import AdafactorConfig
from examples.prodigy import ProdigyConfig
from titan_dit.optim.optimizer import apply_gradients, build_optimizer

GO, STOP = torch.tensor(False), torch.tensor(True)


def parameters():
    generator = torch.Generator().manual_seed(0)
    return {
        "weight": nn.Parameter(torch.randn(8, 12, generator=generator)),
        "bias": nn.Parameter(torch.randn(8, generator=generator)),
    }


def with_gradients(named, step):
    generator = torch.Generator().manual_seed(step)
    for p in named.values():
        p.grad = torch.randn(p.shape, generator=generator)


def test_adafactor_is_torchs():
    ours, theirs = parameters(), parameters()
    config = AdafactorConfig(lr=1e-2, weight_decay=0.1)
    optimizer = build_optimizer(ours, config, None)
    reference = torch.optim.Adafactor(theirs.values(), lr=1e-2, weight_decay=0.1)
    for step in range(5):
        with_gradients(ours, step)
        with_gradients(theirs, step)
        apply_gradients(optimizer, 1e-2, GO)
        reference.step()
    for name, p in ours.items():
        torch.testing.assert_close(p, theirs[name], rtol=0, atol=2e-6)
    state = optimizer.shards[ours["weight"]]
    assert sum(t.numel() for t in state.values()) == 8 + 12 + 1


def test_prodigy_follows_the_algorithm():
    """On one number, in plain arithmetic."""
    config = ProdigyConfig(d0=1e-2, beta1=0.9, beta2=0.99, eps=1e-8)
    p = nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    optimizer = build_optimizer({"p": p}, config, None)
    x, first, d, m, v, s, r = 2.0, 2.0, 1e-2, 0.0, 0.0, 0.0, 0.0
    for rate in (1.0, 1.0, 0.5, 0.5):
        g = 2 * x
        root = math.sqrt(0.99)
        r = root * r + (1 - root) * rate * d * d * g * (first - x)
        s = root * s + (1 - root) * rate * d * d * g
        m, v = 0.9 * m + 0.1 * d * g, 0.99 * v + 0.01 * (d * g) ** 2
        x -= rate * d * m / (math.sqrt(v) + d * 1e-8)
        d = max(d, r / abs(s))
        p.grad = 2 * p.detach()
        apply_gradients(optimizer, rate, GO)
        assert p.item() == pytest.approx(x, rel=1e-6)
        assert optimizer.shards[p]["d"].item() == pytest.approx(d, rel=1e-6)
    assert d > 1e-2, "it has grown"


@pytest.mark.parametrize("config", [AdafactorConfig(), ProdigyConfig(d0=1e-3)])
def test_a_bad_step_changes_no_bit(config):
    named = parameters()
    optimizer = build_optimizer(named, config, None)
    for step in range(2):
        with_gradients(named, step)
        apply_gradients(optimizer, config.lr, GO)
    tensors = [*named.values(), *(t for s in optimizer.shards.values() for t in s.values())]
    before = [t.detach().clone() for t in tensors]
    for p in named.values():
        p.grad = torch.full_like(p, math.nan)
    apply_gradients(optimizer, config.lr, STOP)
    assert all(torch.equal(old, new) for old, new in zip(before, tensors, strict=True))


def test_prodigy_learns_from_a_step_size_of_a_millionth():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    target = nn.Linear(16, 16)
    optimizer = build_optimizer(dict(model.named_parameters()), ProdigyConfig(), None)
    for _ in range(200):
        x = torch.randn(64, 16)
        loss = (model(x) - target(x)).square().mean()
        loss.backward()
        apply_gradients(optimizer, 1.0, GO)
    assert loss < 1e-3
