import math

import pytest
import torch

from titan_dit.noise_schedule import make, named, per_sample

SCHEDULES = [("linear", 1000), ("linear", 250), ("cosine", 1000), ("cosine", 100)]


def betas(name, steps):
    """Written from the papers, one number after the other."""
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
    assert len(schedule) == steps
    assert schedule.timesteps.tolist() == list(range(steps))
    assert schedule.alpha_bar.tolist() == pytest.approx(expected, rel=1e-10)
    torch.testing.assert_close(schedule.signal.square().double(), schedule.alpha_bar)
    torch.testing.assert_close(schedule.signal**2 + schedule.sigma**2, torch.ones(steps))
    torch.testing.assert_close(schedule.snr, schedule.signal**2 / schedule.sigma**2)
    assert schedule.log_beta.exp().tolist() == pytest.approx(betas(name, steps), rel=1e-5)


def test_the_linear_schedule_ends_where_ddpm_says():
    schedule = named("linear", 1000)
    assert schedule.alpha_bar[0].item() == pytest.approx(1 - 1e-4)
    assert schedule.alpha_bar[-1].item() == pytest.approx(4.0358e-5, rel=1e-4)


def test_the_cosine_schedule_falls_as_its_curve():
    schedule, edge = named("cosine", 1000), 0.008 / 1.008
    for k in (0, 250, 500, 990):
        t = (k + 1) / 1000
        curve = math.cos((t + 0.008) / 1.008 * math.pi / 2) ** 2
        assert schedule.alpha_bar[k].item() == pytest.approx(
            curve / math.cos(edge * math.pi / 2) ** 2
        )


@pytest.mark.parametrize(("name", "steps"), SCHEDULES)
def test_the_posterior_is_that_of_bayes(name, steps):
    """q(x_k-1 | x_k, x_0) from the two normal laws that it is the product of."""
    schedule, rates = named(name, steps), torch.tensor(betas(name, steps), dtype=torch.float64)
    before = torch.cat((torch.ones(1, dtype=torch.float64), schedule.alpha_bar[:-1]))
    alpha = 1 - rates
    precision = alpha / rates + 1 / (1 - before)
    from_noisy, from_clean = (
        alpha.sqrt() / rates / precision,
        before.sqrt() / (1 - before) / precision,
    )
    inner = slice(1, None)  # At step 0 x_k-1 is x_0 itself.
    for found, expected in (
        (schedule.posterior_log_variance, -precision.log()),
        (schedule.posterior_from_noisy, from_noisy),
        (schedule.posterior_from_clean, from_clean),
    ):
        torch.testing.assert_close(found[inner].double(), expected[inner], rtol=1e-6, atol=1e-9)
    assert schedule.posterior_from_clean[0] == 1
    assert schedule.posterior_from_noisy[0] == 0
    assert schedule.posterior_log_variance[0] == schedule.posterior_log_variance[1]
    assert (schedule.posterior_log_variance[inner] < schedule.log_beta[inner]).all()


def test_the_posterior_mean_takes_each_sample_at_its_step():
    schedule = named("linear", 1000)
    clean, noisy, step = torch.randn(3, 4, 5), torch.randn(3, 4, 5), torch.tensor([0, 500, 999])
    mean = schedule.posterior_mean(clean, noisy, step)
    for i, k in enumerate(step.tolist()):
        expected = schedule.posterior_from_clean[k] * clean[i]
        expected = expected + schedule.posterior_from_noisy[k] * noisy[i]
        torch.testing.assert_close(mean[i], expected)


def test_respacing_keeps_the_noise_levels_of_the_chosen_steps():
    whole = named("linear", 1000)
    few = whole.respaced([0, 10, 500, 999])
    assert few.timesteps.tolist() == [0, 10, 500, 999]
    assert torch.equal(few.alpha_bar, whole.alpha_bar[[0, 10, 500, 999]])
    jump = 1 - whole.alpha_bar[500] / whole.alpha_bar[10]
    assert few.log_beta[2].exp().item() == pytest.approx(jump.item(), rel=1e-5)
    again = few.respaced([1, 3])
    assert again.timesteps.tolist() == [10, 999]


def test_respacing_to_every_step_changes_nothing():
    whole = named("cosine", 100)
    same = whole.respaced(range(100))
    for name in vars(whole):
        assert torch.equal(getattr(same, name), getattr(whole, name))


def test_a_single_step_has_finite_tables():
    one = named("linear", 1000).respaced([999])
    assert all(table.isfinite().all() for table in vars(one).values())


def test_moved_tables_are_kept():
    schedule, meta = named("linear", 1000), torch.device("meta")
    assert schedule.to(meta) is schedule.to(meta)
    assert schedule.to(meta).signal.is_meta
    assert named("linear", 1000) is schedule


def test_per_sample_entries_multiply_what_they_are_made_for():
    table, like = torch.arange(5.0), torch.ones(2, 3, 4, 6)
    assert per_sample(table, torch.tensor([4, 1]), like).shape == (2, 1, 1, 1)


def test_tables_of_given_levels_follow_their_order():
    alpha_bar = torch.tensor([0.9, 0.5, 0.1], dtype=torch.float64)
    schedule = make(alpha_bar, torch.arange(3))
    assert schedule.log_beta.exp().tolist() == pytest.approx([0.1, 1 - 0.5 / 0.9, 0.8])
