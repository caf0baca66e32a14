"""Rounding of bf16 weights at random, and optimizers over such weights."""

import pytest
import torch
from torch import nn

from examples.prodigy import ProdigyConfig
from titan_dit.config.section import UserError
from titan_dit.config.training import EMAConfig
from titan_dit.models.dit_config import DiTConfig
from titan_dit.optim import optimizer as optimizer_module
from titan_dit.optim.adamw import AdamW
from titan_dit.optim.ema import EMA
from titan_dit.optim.gradient_norm import clip_norm
from titan_dit.optim.optimizer import apply_gradients, build_optimizer
from titan_dit.optim.sections import (
    AdamW4bitConfig,
    AdamW8bitConfig,
    AdamWConfig,
    AdamWFp8Config,
    MuonConfig,
)
from titan_dit.optim.stochastic_rounding import StochasticRounding
from titan_dit.recovery.resume import lines_of_rounding

ALL = [AdamWConfig, AdamW8bitConfig, AdamW4bitConfig, AdamWFp8Config, MuonConfig]
SPEC = DiTConfig(size="S/2", latent_size=32, in_channels=4, num_classes=10).spec()
GO, STOP = torch.tensor(False), torch.tensor(True)


def rounded(values, step=0, seed=0, name="weight"):
    """fp32 values as bf16."""
    shard = nn.Parameter(torch.zeros(values.shape, dtype=torch.bfloat16))
    rounding = StochasticRounding(seed, {shard: name})
    rounding.step = step
    rounding.round(shard, shard.detach(), values, compiles=False)
    return shard.detach()


def test_the_mean_of_many_roundings_is_the_value():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(64, generator=generator) * torch.logspace(-6, 6, 64)
    steps = 4000
    mean = torch.stack([rounded(values, step).double() for step in range(steps)]).mean(0)
    # A rounding is off by at most 2**-7 of the value; the standard deviation at most half of that.
    error = (mean - values.double()).abs() / values.abs()
    assert error.max() < 4 * 2.0**-8 / steps**0.5
    nearest = (values.bfloat16().double() - values.double()).abs() / values.abs()
    assert nearest.max() > 30 * error.max()


def test_a_value_becomes_one_of_its_two_neighbours():
    values = torch.tensor([1.003, -1.003, 3e38, 1e-39]).repeat(500)
    found = rounded(values)
    spacing = torch.tensor([2.0**-7, 2.0**-7, 2.0**120, 2.0**-133]).repeat(500)
    assert ((found.float() - values).abs() < spacing).all()
    assert found[::4].unique().tolist() == [1.0, 1.0078125]
    assert found[1::4].unique().tolist() == [-1.0078125, -1.0]


def test_bf16_numbers_infinities_and_nan_stay():
    numbers = torch.randn(1000).bfloat16()
    assert torch.equal(rounded(numbers.float()), numbers)
    odd = torch.tensor([float("inf"), -float("inf"), 0.0, -0.0])
    assert torch.equal(rounded(odd).float(), odd)
    # The bits of this NaN are all 1.
    assert rounded(torch.full((100,), -1, dtype=torch.int32).view(torch.float32)).isnan().all()


def test_random_bits_depend_on_seed_name_and_step_and_differ_between_elements():
    values = torch.full((4096,), 1.0 + 2.0**-8)
    first = rounded(values)
    assert 0.45 < (first > 1).double().mean() < 0.55
    assert torch.equal(rounded(values), first)
    for other in ({"step": 1}, {"seed": 1}, {"name": "bias"}):
        same = (rounded(values, **other) == first).double().mean()
        assert 0.45 < same < 0.55, other


def parameters():
    """A matrix that is quantised and a bias, in bf16."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"blocks.0.weight": (24, 2048), "blocks.0.bias": (24,)}
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator).bfloat16())
        for name, shape in shapes.items()
    }


def stepped(config, named, steps):
    """The optimizer, after steps with small gradients of random signs."""
    optimizer = build_optimizer(named, config, SPEC, seed=5)
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for p in named.values():
            p.grad = torch.randn(p.shape, generator=generator).bfloat16().to(p.dtype)
        apply_gradients(optimizer, config.lr, GO, step)
    return optimizer


@pytest.mark.parametrize("kind", ALL)
def test_steps_below_half_of_the_last_bit_add_up(kind):
    """The mean weight moves as that of fp32 weights does; rounded to the nearest it would stay."""
    keys = {"fused_qkv": (), "ns_dtype": "fp32"} if kind is MuonConfig else {}
    config = kind(lr=2e-5, weight_decay=0.1, **keys)
    named = parameters()
    wide = {name: nn.Parameter(p.detach().float()) for name, p in named.items()}
    before = wide["blocks.0.weight"].detach().clone()
    stepped(config, named, range(8))
    stepped(config, wide, range(8))
    moved, true = (n["blocks.0.weight"].detach().float() - before for n in (named, wide))
    # Projected on the true step, which is 40 times smaller than what rounding adds.
    share = ((moved * true).sum() / true.square().sum()).item()
    assert share == pytest.approx(1, abs=0.3)


@pytest.mark.parametrize("kind", ALL)
def test_a_bad_step_changes_no_bit_and_states_are_those_of_fp32_weights(kind):
    config = kind(lr=1e-3, **({"fused_qkv": ()} if kind is MuonConfig else {}))
    named = parameters()
    optimizer = stepped(config, named, range(2))
    states = [t for state in optimizer.shards.values() for t in state.values()]
    assert not any(t.dtype == torch.bfloat16 for t in states)
    before = [t.detach().clone() for t in (*states, *named.values())]
    for p in named.values():
        p.grad = torch.full_like(p, float("nan"))
    apply_gradients(optimizer, 1e-3, STOP, 2)
    for old, new in zip(before, [*states, *named.values()], strict=True):
        assert torch.equal(old, new)


def test_averages_are_fp32_and_move_by_steps_that_bf16_would_lose():
    named = {"w": nn.Parameter(torch.ones(100, dtype=torch.bfloat16))}
    ema = EMA(named, EMAConfig(decays=(0.999,), warmup=False))
    with torch.no_grad():
        named["w"].add_(1)
    ema.update(1, GO)
    average = ema.averages["0.999"]["w"]
    assert average.dtype == torch.float32
    torch.testing.assert_close(average, torch.full((100,), 1.001))
    with ema.swapped_in():
        assert (named["w"] == 1).all()
    assert (named["w"] == 2).all()


def test_the_norm_of_bf16_gradients_is_that_of_their_values():
    generator = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.zeros(10_000, dtype=torch.bfloat16))
    p.grad = torch.randn(10_000, generator=generator).bfloat16()
    assert clip_norm([p], 0.0).item() == pytest.approx(p.grad.double().norm().item(), rel=1e-5)


def test_an_optimizer_with_a_step_of_its_own_is_refused():
    with pytest.raises(UserError, match=r'weights="bf16".*Prodigy has a `step` of its own'):
        build_optimizer(parameters(), ProdigyConfig(), None)


def test_a_subclass_of_adamw_gets_its_group_as_a_whole(monkeypatch):
    class Counting(AdamW):
        def update(self, weights, gradients, states, group):
            self.given = len(weights)

    monkeypatch.setattr(optimizer_module, "PIECE", 1)
    named = parameters()
    for kind in (AdamW, Counting):
        found = kind(AdamWConfig().grouped(named), AdamWConfig().defaults)
        assert found.is_elementwise(found.param_groups[0]) == (kind is AdamW)
    found.rounding = StochasticRounding(0, {p: n for n, p in named.items()})
    for p in named.values():
        p.grad = torch.ones_like(p)
    apply_gradients(found, 1e-3, GO)
    assert found.given == len(found.param_groups[0]["params"]) > 1


def test_only_weights_of_more_bits_are_said_to_be_rounded():
    model = parameters() | {"exact": nn.Parameter(torch.ones(1))}
    held = dict.fromkeys(model, torch.bfloat16) | {"exact": torch.float32}
    assert lines_of_rounding(model, held) == []
    (line,) = lines_of_rounding(model, held | {"blocks.0.weight": torch.float32})
    assert "rounded to the nearest bf16 once" in line
