"""DPM-Solver++(2M), and the schedulers of diffusers as samplers."""

import itertools
import math

import pytest
import torch
from points import built

from titan_dit.config.section import UserError
from titan_dit.diffusion.ddpm import Reverse
from titan_dit.diffusion.drawing import sampler_of
from titan_dit.diffusion.samplers import multistep
from titan_dit.diffusion.samplers.base import Settings
from titan_dit.diffusion.sections import DDPMConfig, RectifiedFlowConfig

MEAN, STD = 0.7, 0.3
LINEAR = built(DDPMConfig(), channels=1)


def velocity(x, t):
    """The velocity of data from N(MEAN, STD^2): the optimal network of a flow."""
    t = t[:, None, None]
    variance = (1 - t) ** 2 * STD**2 + t**2
    return -MEAN + (t - (1 - t) * STD**2) / variance * (x - (1 - t) * MEAN)


def eps(x, timestep):
    """The noise of such data at a step of the linear schedule: the optimal network of a DDPM."""
    bar = torch.tensor(Reverse(LINEAR, eps).schedule.alpha_bar)
    # Between two steps a scheduler may ask, too.
    low = timestep.floor().long().clamp(0, 999)
    high = (low + 1).clamp(max=999)
    log = torch.lerp(bar[low].log(), bar[high].log(), timestep - low)
    bar = log.exp()[:, None, None].to(x.dtype)
    return (1 - bar).sqrt() / (bar * STD**2 + 1 - bar) * (x - bar.sqrt() * MEAN)


def reverse(prediction="eps"):
    """A network that predicts the noise, x_0 or v of the data."""
    objective = built(DDPMConfig(learn_sigma=False, prediction=prediction), channels=1)

    def predict(x, timestep):
        noise = eps(x, timestep)
        bar = torch.tensor(Reverse(objective, eps).schedule.alpha_bar)[timestep.long()]
        signal, sigma = bar.sqrt()[:, None, None], (1 - bar).sqrt()[:, None, None]
        clean = (x - sigma * noise) / signal
        return {"eps": noise, "x": clean, "v": signal * noise - sigma * clean}[prediction]

    return Reverse(objective, predict)


def noise(dtype=torch.float32):
    return torch.randn(5, 4, 2, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("steps", [1, 2, 10, 37])
def test_flow_steps_are_those_of_diffusers(steps):
    """On its levels, and at its times: rounded down to thousandths."""
    theirs = sampler_of(RectifiedFlowConfig(), "diffusers:DPMSolverMultistepScheduler")
    assert theirs.__name__ == "DPMSolverMultistepScheduler"
    asked = []

    def recorded(x, t):
        asked.append(t)
        return velocity(x, t)

    expected = theirs(recorded, noise(), Settings(steps, keys=seeds))
    sigmas = [0.999 * (1 - k / steps) for k in range(steps)]
    assert [t[0].item() for t in asked] == pytest.approx(sigmas, abs=1.01e-3)

    def clean_at(number, x):
        return x - sigmas[number] * velocity(x, asked[number])

    levels = [(1 - sigma, sigma) for sigma in (*sigmas, 0.0)]
    found = multistep.solve(clean_at, noise(), levels)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    ours = multistep.flow(velocity, noise(), Settings(steps))
    torch.testing.assert_close(ours, expected, rtol=0, atol=0.01)


@pytest.mark.parametrize("name", ["FlowMatchEulerDiscreteScheduler", "DPMSolverMultistepScheduler"])
def test_a_shift_is_the_scheduler_s_own_and_not_a_second_one(name):
    asked = []

    def recorded(x, t):
        asked.append(t[0].item())
        return velocity(x, t)

    shift, plain = 3.0, sampler_of(RectifiedFlowConfig(), f"diffusers:{name}")
    plain(recorded, noise(), Settings(10, keys=seeds))
    times, asked = asked, []
    plain(recorded, noise(), Settings(10, keys=seeds, shift=shift))
    # They differ in how they space the times that they shift: the least one is 1/1000 or so.
    expected = [shift * t / (1 + (shift - 1) * t) for t in times]
    assert asked == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_the_solver_is_exact_on_a_straight_path(steps):
    data, start = torch.randn(2, 3, 5, 4, dtype=torch.float64)
    kept = start.clone()
    found = multistep.flow(lambda x, t: start - data, start, Settings(steps))
    torch.testing.assert_close(found, data, rtol=0, atol=1e-12)
    assert torch.equal(start, kept)


@pytest.mark.parametrize("prediction", ["eps", "v", "x"])
@pytest.mark.parametrize("steps", [1, 2, 10, 37])
def test_discrete_steps_are_those_of_diffusers(steps, prediction):
    theirs = sampler_of(DDPMConfig(), "diffusers:DPMSolverMultistepScheduler")
    expected = theirs(reverse(prediction), noise(), Settings(steps, keys=seeds))
    found = multistep.discrete(reverse(prediction), noise(), Settings(steps))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def seeds():
    return torch.arange(5) + 7


def test_ten_ddim_steps_are_those_of_diffusers():
    expected = sampler_of(DDPMConfig(), "diffusers:DDIMScheduler")(
        reverse(), noise(), Settings(10, keys=seeds)
    )
    found = sampler_of(DDPMConfig(), "ddim")(reverse(), noise(), Settings(10))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_twice_the_steps_quarter_the_error():
    """Between two levels, so that the first-order ends do not count."""
    start = noise(torch.float64)
    first, last = 0.2, 0.9  # Signals.

    def solved(steps):
        signals = [first + (last - first) * k / steps for k in range(steps + 1)]
        levels = [(signal, 1 - signal) for signal in signals]

        def clean_at(number, x):
            t = torch.full((len(x),), levels[number][1], dtype=x.dtype)
            return x - t[:, None, None] * velocity(x, t)

        # A last level of sigma 0 returns the estimate there: undo it for the value before.
        ends = []
        multistep.solve(lambda k, x: (ends.append(x), clean_at(k, x))[1], start, [*levels, (1, 0)])
        return ends[-1]

    std = [math.hypot(signal * STD, 1 - signal) for signal in (first, last)]
    exact = last * MEAN + std[1] / std[0] * (start - first * MEAN)
    errors = [(solved(steps) - exact).abs().max().item() for steps in (40, 80, 160)]
    assert errors[0] > 1e-6
    for coarse, fine in itertools.pairwise(errors):
        assert coarse / fine == pytest.approx(4, rel=0.1)


@pytest.mark.parametrize(
    "name",
    [
        "EulerDiscreteScheduler",
        "HeunDiscreteScheduler",
        "UniPCMultistepScheduler",
        "CogVideoXDDIMScheduler",  # Has other noise levels, unless told.
    ],
)
def test_other_schedulers_end_at_the_data(name):
    """Of the optimal network: the exact end of the path of each noise."""
    start, bar = noise(), Reverse(LINEAR, eps).schedule.alpha_bar[-1]
    spread = math.sqrt(bar * STD**2 + 1 - bar)
    exact = MEAN + STD / spread * (start - math.sqrt(bar) * MEAN)
    found = sampler_of(DDPMConfig(), f"diffusers:{name}")(
        reverse(), start, Settings(200, keys=seeds)
    )
    torch.testing.assert_close(found, exact, rtol=0, atol=0.02)


def test_flow_schedulers_end_at_the_data():
    exact = MEAN + STD * noise()
    for name in ("FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler"):
        sampler = sampler_of(RectifiedFlowConfig(), f"diffusers:{name}")
        found = sampler(velocity, noise(), Settings(200, keys=seeds))
        torch.testing.assert_close(found, exact, rtol=0, atol=0.02)


def test_a_scheduler_that_draws_noise_draws_it_by_sample():
    sampler = sampler_of(DDPMConfig(), "diffusers:DDPMScheduler")
    whole = sampler(reverse(), noise(), Settings(8, keys=seeds))
    part = sampler(reverse(), noise()[2:4], Settings(8, keys=lambda: seeds()[2:4]))
    torch.testing.assert_close(part, whole[2:4], rtol=0, atol=1e-6)
    other = sampler(reverse(), noise(), Settings(8, keys=lambda: seeds() + 1))
    assert (other - whole).abs().min() > 0


def test_what_cannot_solve_is_refused_by_name():
    with pytest.raises(UserError, match=r"diffusers has no scheduler Wrong\. Name another class"):
        sampler_of(DDPMConfig(), "diffusers:Wrong")
    with pytest.raises(UserError, match="does not solve flows"):
        sampler_of(RectifiedFlowConfig(), "diffusers:DDIMScheduler")
    with pytest.raises(UserError, match="not for discrete diffusion"):
        sampler_of(DDPMConfig(), "diffusers:FlowMatchEulerDiscreteScheduler", "--sampler")
