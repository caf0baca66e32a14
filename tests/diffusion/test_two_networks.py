"""Two networks share the noise levels of one drawing: `guidance.LowExpert`."""

import dataclasses

import pytest
import torch
from test_drawing import built, network

from titan_dit.config.catalog import SAMPLERS
from titan_dit.diffusion.drawing import generate, sampler_of
from titan_dit.diffusion.guidance import Guidance, LowExpert
from titan_dit.diffusion.sections import DDPMConfig, RectifiedFlowConfig

LEVEL = 0.6
GUIDANCES = {
    "none": Guidance(1.0),
    "by the label": Guidance(3.0),
    "in an interval": Guidance(3.0, interval=(0.2, 0.7)),
    "rescaled": Guidance(3.0, rescale=0.7, channels=1),
}
DRAWN = [
    *((RectifiedFlowConfig(), name) for name in SAMPLERS["rectified_flow"]),
    *((DDPMConfig(prediction="eps", learn_sigma=False), name) for name in SAMPLERS["ddpm"]),
    (RectifiedFlowConfig(direction="to_data"), "heun"),
    (RectifiedFlowConfig(), "diffusers:UniPCMultistepScheduler"),
]


def draw(section, sampler, high, low=None, guidance=GUIDANCES["by the label"]):
    objective = built(section)
    with torch.no_grad():
        return generate(
            high,
            objective,
            {"labels": torch.tensor([3, 1])},
            torch.arange(2),
            seed=0,
            sampler=sampler_of(section, sampler),
            steps=6,
            guidance=guidance,
            low=low,
        )


def asked(calls, model):
    """A network that notes its timesteps and how many samples it is given."""

    def forward(inputs, static):
        calls.append((inputs["timestep"][0].item(), len(inputs["tokens"])))
        return model(inputs, static)

    return forward


def low_of(forward, static, **more):
    """The network below LEVEL: as `forward`, with its static inputs."""

    def predict(x, timestep, given):
        return forward({"tokens": x, "timestep": timestep, **given}, static).float()

    return LowExpert(predict, LEVEL, **more)


@pytest.mark.parametrize(("section", "sampler"), DRAWN, ids=lambda one: getattr(one, "name", one))
def test_each_network_is_asked_at_its_noise_levels_alone(section, sampler):
    if sampler.startswith("diffusers:"):
        pytest.importorskip("diffusers")
    model, objective = network(), built(section)
    high, low, alone = [], [], []
    static = objective.static(torch.device("cpu"))
    both = draw(section, sampler, asked(high, model), low_of(asked(low, model), static))
    single = draw(section, sampler, asked(alone, model))
    # As if one network had drawn all; every call is of one of the two.
    assert torch.equal(both, single)
    assert high + low == alone
    levels = [[objective.noise_level(t) for t, _ in calls] for calls in (high, low)]
    assert min(levels[0]) >= LEVEL - 1e-6
    assert max(levels[1]) < LEVEL


@pytest.mark.parametrize("guidance", GUIDANCES)
def test_every_guidance_guides_both_networks(guidance):
    section, model = RectifiedFlowConfig(), network()
    static = built(section).static(torch.device("cpu"))
    guidance = GUIDANCES[guidance]
    both = draw(section, "heun", model, low_of(model, static), guidance)
    assert torch.equal(both, draw(section, "heun", model, guidance=guidance))


def test_the_low_network_may_have_a_guidance_scale_of_its_own():
    section, model, high, low = RectifiedFlowConfig(), network(), [], []
    static = built(section).static(torch.device("cpu"))
    expert = low_of(asked(low, model), static, scale=1.0)
    draw(section, "euler", asked(high, model), expert)
    # Without guidance one pass is enough.
    assert {rows for _, rows in high} == {4}
    assert {rows for _, rows in low} == {2}
    plain = draw(section, "euler", model, low_of(model, static), GUIDANCES["none"])
    mixed = draw(section, "euler", model, low_of(model, static, scale=1.0), Guidance(3.0))
    assert (plain - mixed).abs().max() > 1e-3


def test_the_boundary_itself_is_of_the_high_network():
    section, model, high, low = RectifiedFlowConfig(), network(), [], []
    static = built(section).static(torch.device("cpu"))
    expert = dataclasses.replace(low_of(asked(low, model), static), boundary=0.5)
    draw(section, "euler", asked(high, model), expert, GUIDANCES["none"])
    # Six steps: t = 3/6 is a time of the line.
    assert [t for t, _ in high] == pytest.approx([1000, 5000 / 6, 4000 / 6, 500])
    assert [t for t, _ in low] == pytest.approx([2000 / 6, 1000 / 6])
