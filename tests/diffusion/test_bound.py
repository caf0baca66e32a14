import math

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from titan_dit.diffusion.ddpm import bits_per_value, gaussian_kl, log_likelihood, normal_cdf
from titan_dit.diffusion.noise_schedule import named

TABLES = named("linear", 1000).tables(torch.device("cpu"))


def test_the_divergence_is_that_of_two_normal_laws():
    mean_p, mean_q, log_p, log_q = torch.randn(4, 50, dtype=torch.float64)
    expected = kl_divergence(Normal(mean_p, (log_p / 2).exp()), Normal(mean_q, (log_q / 2).exp()))
    torch.testing.assert_close(gaussian_kl(mean_p, log_p, mean_q, log_q), expected)
    assert gaussian_kl(mean_p, log_p, mean_p, log_p).abs().max() < 1e-12


@pytest.mark.parametrize("mean", [-0.98, 0.0, 0.3])
@pytest.mark.parametrize("std", [0.01, 0.1, 1.0])
def test_the_likelihoods_of_all_grey_levels_add_up_to_one(mean, std):
    levels = torch.arange(256, dtype=torch.float64) / 127.5 - 1
    log_variance = torch.full_like(levels, 2 * math.log(std))
    found = log_likelihood(levels, torch.full_like(levels, mean), log_variance)
    assert found.exp().sum().item() == pytest.approx(1, abs=1e-6)


def test_the_likelihood_is_that_of_the_bin_under_the_normal_law():
    x, std = torch.linspace(-0.9, 0.9, 40, dtype=torch.float64), 0.2
    law = Normal(torch.tensor(0.1, dtype=torch.float64), std)
    expected = law.cdf(x + 1 / 255) - law.cdf(x - 1 / 255)
    log_variance = torch.full_like(x, 2 * math.log(std))
    found = log_likelihood(x, torch.full_like(x, 0.1), log_variance).exp()
    # The tanh form is within 3e-4 of the CDF; its slope within 2%.
    torch.testing.assert_close(found, expected, rtol=0.03, atol=1e-5)


def test_the_distribution_function_is_approximated_within_3e_4():
    x = torch.linspace(-6, 6, 1001, dtype=torch.float64)
    assert (normal_cdf(x) - Normal(0.0, 1.0).cdf(x)).abs().max() < 3e-4


def at(step, clean, estimate, log_variance):
    steps = torch.full((len(clean),), step)
    noisy = TABLES.signal[step] * clean + TABLES.sigma[step] * torch.randn_like(clean)
    return bits_per_value(clean, noisy, steps, estimate, log_variance, TABLES)


@pytest.mark.parametrize("step", [1, 10, 100])
def test_a_perfect_network_pays_nothing(step):
    clean = torch.randn(2, 3, 4)
    posterior = TABLES.posterior_log_variance[step].expand_as(clean)
    assert at(step, clean, clean, posterior).abs().max() < 1e-6
    # Any other variance has a positive KL, which is known for beta.
    beta = TABLES.log_beta[step].expand_as(clean)
    gap = (posterior - beta).double()
    expected = 0.5 * (gap.exp() - 1 - gap) / math.log(2)
    found = at(step, clean, clean, beta)
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-6)
    assert (found > 0).all()


def test_a_wrong_estimate_pays_its_squared_distance_in_the_posterior_mean():
    step, clean = 300, torch.randn(2, 3, 4, dtype=torch.float64)
    posterior = TABLES.posterior_log_variance[step].double().expand_as(clean)
    error = TABLES.posterior_from_clean[step].double() * 0.1
    found = at(step, clean, clean + 0.1, posterior)
    expected = 0.5 * error**2 / posterior.exp() / math.log(2)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=0)


def test_at_step_0_the_bound_is_the_surprise_of_the_data_in_bits():
    clean = torch.rand(2, 3, 4, dtype=torch.float64) - 0.5
    log_variance = torch.full_like(clean, -4)
    found = at(0, clean, clean, log_variance)
    torch.testing.assert_close(found, -log_likelihood(clean, clean, log_variance) / math.log(2))
    # All probability in the right bin has loss 0; in a wrong one it is clamped at 1e-12.
    sharp = at(0, clean, clean, torch.full_like(clean, -20))
    assert sharp.max() < 1e-3
    missed = at(0, clean, clean + 0.5, torch.full_like(clean, -20))
    torch.testing.assert_close(missed, torch.full_like(clean, 12 * math.log2(10)))


def test_each_sample_is_judged_at_its_own_step():
    clean, noisy, estimate, spread = torch.randn(4, 3, 2, 5)
    spread = spread - 5
    steps = torch.tensor([0, 400, 0])
    whole = bits_per_value(clean, noisy, steps, estimate, spread, TABLES)
    for i in range(3):
        row = slice(i, i + 1)
        part = [v[row] for v in (clean, noisy, steps, estimate, spread)]
        torch.testing.assert_close(whole[row], bits_per_value(*part, TABLES))
