import math

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from titan_dit.diffusion.noise_schedule import NoiseSchedule, Tables, named, per_sample

CPU = torch.device("cpu")
SCHEDULES = [("linear", 1000), ("linear", 250), ("cosine", 1000), ("cosine", 100)]


def betas(name, steps):
    """A scalar implementation from the papers."""
    if name == "linear":
        first, last = 0.1 / steps, 20 / steps
        return [first + (last - first) * k / (steps - 1) for k in range(steps)]

    def level(t):
        return math.cos((t + 0.008) / 1.008 * math.pi / 2) ** 2

    return [min(1 - level((k + 1) / steps) / level(k / steps), 0.999) for k in range(steps)]


@pytest.mark.parametrize(("name", "steps"), SCHEDULES)
def test_alpha_bar_is_the_product_of_what_each_step_keeps(name, steps):
    expected, kept = [], 1.0
    for beta in betas(name, steps):
        kept *= 1 - beta
        expected.append(kept)
    schedule = named(name, steps)
    tables = schedule.tables(CPU)
    assert len(schedule) == steps
    assert schedule.timesteps == tuple(range(steps))
    assert tables.timestep.tolist() == list(range(steps))
    assert schedule.alpha_bar == pytest.approx(expected, rel=1e-10)
    assert tables.signal.square().tolist() == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(tables.signal**2 + tables.sigma**2, torch.ones(steps))
    torch.testing.assert_close(tables.snr, tables.signal**2 / tables.sigma**2)
    assert tables.log_beta.exp().tolist() == pytest.approx(betas(name, steps), rel=1e-5)


def test_the_linear_schedule_ends_where_ddpm_says():
    schedule = named("linear", 1000)
    assert schedule.alpha_bar[0] == pytest.approx(1 - 1e-4)
    assert schedule.alpha_bar[-1] == pytest.approx(4.0358e-5, rel=1e-4)


def test_the_cosine_schedule_falls_as_its_curve():
    schedule, edge = named("cosine", 1000), 0.008 / 1.008
    for k in (0, 250, 500, 990):
        t = (k + 1) / 1000
        curve = math.cos((t + 0.008) / 1.008 * math.pi / 2) ** 2
        assert schedule.alpha_bar[k] == pytest.approx(curve / math.cos(edge * math.pi / 2) ** 2)


@pytest.mark.parametrize(("name", "steps"), SCHEDULES)
def test_the_posterior_is_that_of_bayes(name, steps):
    """q(x_k-1 | x_k, x_0) from the product of two normal densities."""
    schedule, rates = named(name, steps), np.array(betas(name, steps))
    tables = schedule.tables(CPU)
    before = np.array([1.0, *schedule.alpha_bar[:-1]])
    inner = slice(1, None)  # At step 0 x_k-1 is x_0 itself.
    rates, before = rates[inner], before[inner]
    precision = (1 - rates) / rates + 1 / (1 - before)
    for found, expected in (
        (tables.posterior_log_variance, -np.log(precision)),
        (tables.posterior_from_noisy, np.sqrt(1 - rates) / rates / precision),
        (tables.posterior_from_clean, np.sqrt(before) / (1 - before) / precision),
    ):
        np.testing.assert_allclose(found[inner].numpy(), expected, rtol=1e-6, atol=1e-9)
    assert tables.posterior_from_clean[0] == 1
    assert tables.posterior_from_noisy[0] == 0
    assert tables.posterior_log_variance[0] == tables.posterior_log_variance[1]
    assert (tables.posterior_log_variance[inner] < tables.log_beta[inner]).all()


def test_the_posterior_mean_takes_each_sample_at_its_step():
    tables = named("linear", 1000).tables(CPU)
    clean, noisy, step = torch.randn(3, 4, 5), torch.randn(3, 4, 5), torch.tensor([0, 500, 999])
    mean = tables.posterior_mean(clean, noisy, step)
    for i, k in enumerate(step.tolist()):
        expected = tables.posterior_from_clean[k] * clean[i]
        expected = expected + tables.posterior_from_noisy[k] * noisy[i]
        torch.testing.assert_close(mean[i], expected)


def test_respacing_keeps_the_noise_levels_of_the_chosen_steps():
    whole, chosen = named("linear", 1000), [0, 10, 500, 999]
    few = whole.respaced(chosen)
    assert few.timesteps == tuple(chosen)
    assert few.alpha_bar == tuple(whole.alpha_bar[k] for k in chosen)
    jump = 1 - whole.alpha_bar[500] / whole.alpha_bar[10]
    assert few.tables(CPU).log_beta[2].exp().item() == pytest.approx(jump, rel=1e-5)
    assert few.respaced([1, 3]).timesteps == (10, 999)


def test_respacing_to_every_step_changes_nothing():
    whole = named("cosine", 100)
    assert whole.respaced(range(100)) == whole


def test_a_single_step_has_finite_tables():
    one = named("linear", 1000).respaced([999]).tables(CPU)
    assert all(table.isfinite().all() for table in one)


def test_tables_belong_to_the_mode_and_device_they_are_asked_for_in():
    """A table cached by a dry run (fake mode) must not reach a step, nor the reverse."""
    named.cache_clear()
    with FakeTensorMode():
        assert type(named("linear", 50).tables(CPU).signal).__name__ == "FakeTensor"
    with torch.device("meta"):
        assert named("linear", 50).tables(CPU).signal.device.type == "cpu"
    assert type(named("linear", 50).tables(CPU).signal) is torch.Tensor
    assert named("linear", 50).tables(torch.device("meta")).signal.is_meta


def test_per_sample_entries_multiply_what_they_are_made_for():
    table, like = torch.arange(5.0), torch.ones(2, 3, 4, 6)
    assert per_sample(table, torch.tensor([4, 1]), like).shape == (2, 1, 1, 1)


def test_tables_follow_the_given_levels():
    tables = NoiseSchedule((0.9, 0.5, 0.1), (3, 5, 9)).tables(CPU)
    assert isinstance(tables, Tables)
    assert tables.log_beta.exp().tolist() == pytest.approx([0.1, 1 - 0.5 / 0.9, 0.8])
    assert tables.timestep.tolist() == [3, 5, 9]
