import itertools

import pytest
import torch

from titan_dit.diffusion.samplers import multistep
from titan_dit.diffusion.samplers.base import Settings
from titan_dit.diffusion.samplers.ode import euler, heun, times


class Counted:
    """A velocity that records its times."""

    def __init__(self, velocity):
        self.velocity, self.times = velocity, []

    def __call__(self, x, t):
        assert t.shape == (x.shape[0],)
        assert (t == t[0]).all()
        self.times.append(t[0].item())
        return self.velocity(x, t)


def bent(x, t):
    """dx/dt = t x^2: 1/x(0) = 1/x(1) + 1/2."""
    return t[:, None, None] * x**2


def start_of_bent():
    noise = torch.linspace(-0.9, 1.5, 12, dtype=torch.float64).view(2, 3, 2) + 0.01
    return noise, 1 / (1 / noise + 0.5)


@pytest.mark.parametrize("sampler", [euler, heun])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_samplers_are_exact_on_a_straight_path(sampler, steps):
    data, noise = torch.randn(2, 3, 5, 4, dtype=torch.float64)
    samples = sampler(lambda x, t: noise - data, noise, Settings(steps))
    torch.testing.assert_close(samples, data, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("sampler", "factor"), [(euler, 2), (heun, 4)])
def test_twice_the_steps_divide_the_error_by_the_samplers_order(sampler, factor):
    noise, exact = start_of_bent()
    errors = [
        (sampler(bent, noise, Settings(steps)) - exact).abs().max().item()
        for steps in (40, 80, 160)
    ]
    assert errors[0] > 1e-6
    for coarse, fine in itertools.pairwise(errors):
        assert coarse / fine == pytest.approx(factor, rel=0.08)


def test_euler_asks_at_the_start_of_each_step():
    velocity = Counted(bent)
    euler(velocity, start_of_bent()[0], Settings(4))
    assert velocity.times == [1, 0.75, 0.5, 0.25]


def test_heun_asks_at_both_ends_of_each_step():
    velocity = Counted(bent)
    heun(velocity, start_of_bent()[0], Settings(4))
    assert velocity.times == [1, 0.75, 0.75, 0.5, 0.5, 0.25, 0.25, 0]


@pytest.mark.parametrize("sampler", [euler, heun])
def test_samplers_leave_the_noise_alone(sampler):
    noise, _ = start_of_bent()
    kept = noise.clone()
    assert not torch.equal(sampler(bent, noise, Settings(3)), kept)
    assert torch.equal(noise, kept)


@pytest.mark.parametrize("shift", [0.5, 3.0])
def test_the_times_of_a_step_are_shifted(shift):
    asked = []

    def velocity(x, t):
        asked.append(t[0].item())
        return torch.zeros_like(x)

    euler(velocity, torch.randn(2, 3, 4), Settings(4, shift=shift))
    plain = [1.0, 0.75, 0.5, 0.25]
    assert asked == pytest.approx([shift * t / (1 + (shift - 1) * t) for t in plain])
    assert times(torch.zeros(1, 1, 1), Settings(4, shift=shift))[-1].item() == 0


@pytest.mark.parametrize("sampler", [euler, heun, multistep.flow])
def test_a_shifted_path_ends_at_the_data(sampler):
    noise, data = torch.randn(2, 2, 3, 4)
    found = sampler(lambda x, t: noise - data, noise, Settings(5, shift=3.0))
    torch.testing.assert_close(found, data, rtol=1e-5, atol=1e-5)
