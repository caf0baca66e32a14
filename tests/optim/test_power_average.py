"""Power-function averages: their profiles, and the weights that combine some to another one."""

import numpy as np
import pytest
import torch
from torch import nn

from titan_dit.config.training import EMAConfig, power_name
from titan_dit.optim.ema import EMA, Profile, clock, exponent, expressible, fit, products

STEPS, KEPT = 256, (0.05, 0.1)
WIDTHS = (0.05, 0.06, 0.075, 0.09, 0.1)


def profiles_of(widths, every=1, bad=(), steps=STEPS):
    """Step -> width -> share of the weights of each step in the average, as EMA keeps it.

    The weights of step s are the s-th unit vector: an average of them is its profile. A bad step
    leaves the weights of the step before.
    """
    weights = {"w": nn.Parameter(torch.zeros(steps + 1, dtype=torch.float64))}
    with torch.no_grad():
        weights["w"][0] = 1.0
    ema = EMA(weights, EMAConfig(decays=(), power=tuple(widths), every=every))
    found = {}
    for step in range(1, steps + 1):
        if step not in bad:
            with torch.no_grad():
                weights["w"].zero_()[step] = 1.0
        ema.update(step, skip=torch.tensor(step in bad))
        found[step] = {s: ema.averages[power_name(s)]["w"].numpy().copy() for s in widths}
    return found


@pytest.mark.parametrize("sigma_rel", [0.001, 0.05, 0.1, 0.2, 0.28])
def test_the_exponent_has_the_relative_width(sigma_rel):
    gamma = exponent(sigma_rel)
    assert gamma > 0
    variance = (gamma + 1) / ((gamma + 2) ** 2 * (gamma + 3))
    assert variance**0.5 == pytest.approx(sigma_rel, rel=1e-9)


@pytest.mark.parametrize("every", [1, 4])
def test_an_average_weighs_every_step_by_the_power_function(every):
    found = profiles_of(WIDTHS, every)
    for step in (every, 40, STEPS):
        times = np.arange(0, step + 1, every)
        for sigma_rel in WIDTHS:
            power = exponent(sigma_rel) + 1
            expected = np.zeros(STEPS + 1)
            expected[times[1:]] = np.diff((times / step) ** power)
            np.testing.assert_allclose(found[step][sigma_rel], expected, atol=1e-7)
            assert found[step][sigma_rel].sum() == pytest.approx(1.0, abs=1e-6)
    weight, place = found[STEPS][0.1], np.arange(STEPS + 1)
    mean = (weight * place).sum()
    assert ((weight * (place - mean) ** 2).sum()) ** 0.5 / STEPS == pytest.approx(0.1, rel=2e-3)


def test_products_of_profiles_are_their_integrals():
    profiles = [Profile(t, s) for t in (0.3, 1.0, 1.7) for s in (0.05, 0.1, 0.25)]
    # Midpoints of a grid that holds every end.
    times = (np.arange(170_000) + 0.5) / 1e5
    drawn = []
    for p in profiles:
        gamma = exponent(p.sigma_rel)
        drawn.append(
            np.where(times < p.time, (gamma + 1) * times**gamma / p.time ** (gamma + 1), 0)
        )
    expected = np.array(drawn) @ np.array(drawn).T / 1e5
    np.testing.assert_allclose(products(profiles, profiles), expected, rtol=1e-6)


def kept_profiles(snapshots, bad=(), every=1):
    ranges = [(step, step) for step in sorted(bad)]
    times = {step: clock(step, every, [r for r in ranges if r[1] <= step]) for step in snapshots}
    return [Profile(times[step], s) for step in snapshots for s in KEPT]


@pytest.mark.parametrize("number", [32, 64])
def test_the_weights_sum_to_one_and_fit_the_profile_in_fp64(number):
    given = kept_profiles(range(STEPS // number, STEPS + 1, STEPS // number))
    for sigma_rel in WIDTHS:
        found = fit(given, Profile(STEPS, sigma_rel))
        assert sum(found.weights) == pytest.approx(1.0, abs=1e-14)
        assert found.error < (1e-3 if number == 32 else 2.5e-4)
        # The error is that of the combined profile itself.
        times = (np.arange(40_000) + 0.5) / 40_000 * STEPS
        wanted = drawn(Profile(STEPS, sigma_rel), times)
        miss = -wanted
        for weight, profile in zip(found.weights, given, strict=True):
            miss = miss + weight * drawn(profile, times)
        assert np.linalg.norm(miss) / np.linalg.norm(wanted) == pytest.approx(found.error, abs=2e-6)


def drawn(profile, times):
    gamma = exponent(profile.sigma_rel)
    inside = np.minimum(times, profile.time) / profile.time
    return np.where(times < profile.time, (gamma + 1) * inside**gamma / profile.time, 0)


def test_a_kept_width_is_the_kept_average_alone():
    given = kept_profiles(range(8, STEPS + 1, 8))
    for place, sigma_rel in ((-2, 0.05), (-1, 0.1)):
        weights = list(fit(given, Profile(STEPS, sigma_rel)).weights)
        assert weights.pop(place) == 1.0
        assert not any(weights)


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("bad", [(), tuple(range(1, 6)), (7, 50, *range(180, 230), 248, 251)])
def test_combined_averages_are_the_one_kept_in_training_also_over_bad_steps(bad, every):
    averages = profiles_of(WIDTHS, every, bad)
    snapshots = range(4, STEPS + 1, 4)
    given = kept_profiles(snapshots, bad, every)
    end = clock(STEPS, every, [(step, step) for step in sorted(bad)])
    for sigma_rel in WIDTHS:
        weights = iter(fit(given, Profile(end, sigma_rel)).weights)
        made = sum(next(weights) * averages[step][s] for step in snapshots for s in KEPT)
        expected = averages[STEPS][sigma_rel]
        # A random walk shows errors of both long and short times.
        walk = np.random.default_rng(0).normal(size=(STEPS + 1, 64)).cumsum(0)
        distance = np.linalg.norm(walk[STEPS] - expected @ walk)
        assert np.linalg.norm((made - expected) @ walk) <= 1e-4 * distance, sigma_rel


def test_the_clock_stands_still_in_skipped_updates():
    assert clock(100, 1, []) == 100
    assert clock(99, 5, []) == 95
    assert clock(100, 1, [(51, 60)]) == pytest.approx(100 * 50 / 60)
    # At the range's end as at its begin; the first updates of a run leave no gap.
    assert clock(60, 1, [(51, 60)]) == clock(50, 1, []) == 50
    assert clock(100, 1, [(1, 9)]) == 100
    # Ranges of samples of one step: it counts once.
    assert clock(100, 1, [(58, 60), (51, 58), (60, 60)]) == pytest.approx(100 * 50 / 60)
    # Bad steps without an update are none of the averages'.
    assert clock(100, 5, [(51, 54)]) == 100
    assert clock(100, 5, [(55, 55)]) == pytest.approx(100 * 50 / 55)


def test_expressible_widths_are_around_the_kept_ones_and_grow_with_the_snapshots():
    few = expressible(kept_profiles((4,)), 4, 0.01)
    assert [low <= s <= high for (low, high), s in zip(few, KEPT, strict=True)] == [True, True]
    [(low, high)] = expressible(kept_profiles(range(4, STEPS + 1, 4)), STEPS, 0.01)
    assert low < 0.03
    assert high > 0.2
    for number in (8, 64):
        given = kept_profiles(range(STEPS // number, STEPS + 1, STEPS // number))
        for ends in expressible(given, STEPS, 0.01):
            for sigma_rel in ends:  # As it is shown.
                assert fit(given, Profile(STEPS, float(f"{sigma_rel:.3g}"))).error <= 0.01
