import itertools

import pytest
import torch

from titan_dit.config.section import UserError
from titan_dit.diffusion.noise_schedule import Denoised, named, per_sample
from titan_dit.diffusion.samplers.base import Settings
from titan_dit.diffusion.samplers.discrete import ddim, ddpm, spread_from_start, spread_with_ends

MEAN, STD = 0.7, 0.3


class Exact:
    """E[x_0 | x_k] and Var[x_k-1 | x_k] of normal data: the optimal network."""

    def __init__(self, schedule):
        self.schedule = schedule
        self.asked = []

    def __call__(self, x, step, tables):
        self.asked.append(tables.timestep[step[0]].item())
        signal, sigma = (per_sample(t, step, x) for t in (tables.signal, tables.sigma))
        gain = signal * STD**2 / (signal**2 * STD**2 + sigma**2)
        clean = MEAN + gain * (x - signal * MEAN)
        left = STD**2 * (1 - gain * signal)
        posterior = per_sample(tables.posterior_log_variance, step, x).exp()
        spread = per_sample(tables.posterior_from_clean, step, x) ** 2 * left
        return Denoised(clean, (posterior + spread).log().expand_as(x))


class Arbitrary:
    """An arbitrary estimate, with the variance of the posterior."""

    schedule = named("linear", 50)

    def __call__(self, x, step, tables):
        clean = torch.sin(3 * x) + step.view(-1, 1, 1) / 50
        return Denoised(clean, per_sample(tables.posterior_log_variance, step, x).expand_as(x))


def fresh(shape, seed=1):
    return lambda step: torch.randn(shape, generator=torch.Generator().manual_seed(seed + step))


def test_ddim_at_eta_1_is_ancestral_sampling():
    noise = torch.randn(3, 4, 5)
    settings = Settings(50, 1.0, fresh(noise.shape))
    ancestral = ddpm(Arbitrary(), noise, settings)
    torch.testing.assert_close(ddim(Arbitrary(), noise, settings), ancestral, rtol=1e-4, atol=1e-4)
    half = ddim(Arbitrary(), noise, Settings(50, 0.5, fresh(noise.shape)))
    assert (half - ancestral).abs().max() > 0.1


@pytest.mark.parametrize(
    ("sampler", "eta", "steps"),
    [(ddpm, 0, 200), (ddpm, 0, 1000), (ddim, 1, 1000), (ddim, 0.5, 500)],
)
def test_with_exact_estimates_the_samples_have_the_law_of_the_data(sampler, eta, steps):
    noise = torch.randn(40, 50, 10, generator=torch.Generator().manual_seed(0))
    settings = Settings(steps, eta, fresh(noise.shape))
    samples = sampler(Exact(named("linear", 1000)), noise, settings)
    # 20,000 values: three standard errors of the mean are 0.0064, of the deviation 0.0045.
    assert samples.mean().item() == pytest.approx(MEAN, abs=0.0064)
    assert samples.std().item() == pytest.approx(STD, abs=0.0075)


def test_ddim_without_noise_moves_every_value_along_its_quantile():
    noise = torch.linspace(-2, 2, 12).view(1, 3, 4)
    found = ddim(Exact(named("linear", 1000)), noise, Settings(1000))
    torch.testing.assert_close(found, MEAN + STD * noise, rtol=0, atol=5e-3)


def test_ddim_asks_for_no_noise_at_eta_0_and_leaves_its_input_alone():
    noise = torch.randn(2, 3, 4)
    kept = noise.clone()
    found = ddim(Exact(named("linear", 1000)), noise, Settings(10))
    assert torch.equal(noise, kept)
    assert torch.equal(found, ddim(Exact(named("linear", 1000)), noise, Settings(10)))
    with pytest.raises(UserError, match="adds noise"):
        ddpm(Exact(named("linear", 1000)), noise, Settings(10))


def test_the_network_is_asked_at_the_timesteps_it_was_trained_with():
    network = Exact(named("linear", 1000))
    ddim(network, torch.randn(2, 3, 4), Settings(10))
    assert network.asked == [900, 800, 700, 600, 500, 400, 300, 200, 100, 0]
    network = Exact(named("linear", 1000))
    ddpm(network, torch.randn(2, 3, 4), Settings(4, fresh=fresh((2, 3, 4))))
    assert network.asked == [999, 666, 333, 0]


def original_spacing(total, count):
    """Accumulates the stride, as the original does for its "250"."""
    stride, place, chosen = (total - 1) / (count - 1) if count > 1 else 1, 0.0, []
    for _ in range(count):
        chosen.append(round(place))
        place += stride
    return chosen


@pytest.mark.parametrize("count", [1, 2, 3, 5, 25, 50, 100, 250, 500, 999, 1000])
def test_ancestral_steps_are_spaced_as_in_the_original(count):
    assert spread_with_ends(count, 1000) == original_spacing(1000, count)
    assert len(set(spread_with_ends(count, 1000))) == count


def test_ddim_steps_have_the_stride_of_the_original():
    """It takes the first stride that gives the count, and raises if there is none."""
    by_count = {}
    for stride in range(1, 1000):
        by_count.setdefault(len(range(0, 1000, stride)), list(range(0, 1000, stride)))
    assert {10, 11, 25, 32, 250, 334, 1000} < set(by_count)
    for count, steps in by_count.items():
        assert spread_from_start(count, 1000) == steps


@pytest.mark.parametrize("count", [300, 501, 998])
def test_ddim_takes_counts_that_no_stride_gives(count):
    steps = spread_from_start(count, 1000)
    gaps = {after - step for step, after in itertools.pairwise(steps)}
    assert len(steps) == count
    assert steps[0] == 0
    assert max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize("sampler", [ddpm, ddim])
def test_more_steps_than_the_network_knows_are_refused(sampler):
    with pytest.raises(UserError, match=r"steps=51: the network is trained with 50"):
        sampler(Arbitrary(), torch.randn(1, 2, 2), Settings(51, 0.0, fresh((1, 2, 2))))
