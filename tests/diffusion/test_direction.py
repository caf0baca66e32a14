"""A flow that is written in the other direction, or in another unit of time, is the same flow."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from points import batch_of, built, prepare

from titan_dit.commands import sample_inputs
from titan_dit.config import catalog
from titan_dit.config.section import UserError
from titan_dit.config.training import SamplingConfig
from titan_dit.data.latent_facts import VAEFacts
from titan_dit.diffusion import previews
from titan_dit.diffusion.drawing import generate, sampler_of
from titan_dit.diffusion.guidance import Guidance
from titan_dit.diffusion.sections import RectifiedFlowConfig
from titan_dit.objectives.base import DataShare
from titan_dit.rng import SampleRNG

OTHERS = [("to_data", 1.0), ("to_data", 1000.0), ("to_noise", 1.0)]
OWN = ["euler", "heun", "dpmpp_2m"]
DIFFUSERS = [
    "diffusers:DPMSolverMultistepScheduler",
    "diffusers:FlowMatchEulerDiscreteScheduler",
    "diffusers:UniPCMultistepScheduler",
]
NUMBERS = torch.arange(40, 48)


class Network(torch.nn.Module):
    """A small network f(x, t, label) of the time t from data to noise; t takes part in all of it.

    `written` gives the same function as a network of another direction and unit.
    """

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down = torch.nn.Linear(6, 16), torch.nn.Linear(16, 4)

    def forward(self, x, t, labels):
        more = torch.stack((3 * t, labels * 0.2), -1)[:, None].expand(-1, x.shape[1], -1)
        return self.down(torch.tanh(self.up(torch.cat((x, more), -1))))

    def written(self, path):
        def forward(inputs, static=None):
            along = inputs["timestep"] / path.time_scale
            back = path.direction == "to_data"
            found = self(inputs["tokens"], 1 - along if back else along, inputs["labels"])
            found = -found if back else found
            # With `learn_sigma` one pixel a token: its other values come behind.
            return torch.cat((found, 9 + found), -1) if path.learn_sigma else found

        return forward


def flow(direction="to_noise", time_scale=1000.0, **settings):
    return RectifiedFlowConfig(direction=direction, time_scale=time_scale, **settings)


def trained(path):
    """Loss and gradients of one batch, and the losses of validation by name."""
    network = Network()
    objective, forward = built(path), network.written(path)
    prepared = prepare(path, NUMBERS, seed=3)
    loss = objective.loss({"prediction": forward(prepared.inputs)}, prepared.targets).mean()
    gradients = torch.autograd.grad(loss, list(network.parameters()))
    validation = {
        name: objective.loss({"prediction": forward(part.inputs)}, part.targets).mean()
        for name, part in objective.evaluations(batch_of(NUMBERS), SampleRNG(3, NUMBERS)).items()
    }
    return [loss, *gradients], validation


SETTINGS = [{}, {"timesteps": "uniform"}, {"shift": 3.0, "logit_mean": 1.0}]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize(("direction", "scale"), OTHERS)
def test_losses_and_gradients_are_equal(direction, scale, settings):
    expected, validation = trained(flow(**settings))
    for learn_sigma in (False, True):
        found, again = trained(flow(direction, scale, learn_sigma=learn_sigma, **settings))
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-5, atol=1e-6)
        assert list(again) == list(validation)
        for name, loss in validation.items():
            torch.testing.assert_close(again[name], loss, rtol=2e-5, atol=1e-6)
    # The bins are different levels of noise.
    assert len({round(loss.item(), 4) for loss in validation.values()}) == 8


def test_the_network_sees_time_as_its_keys_say():
    t = built(flow()).times(SampleRNG(3, NUMBERS))
    for direction, scale in OTHERS:
        inputs = prepare(flow(direction, scale), NUMBERS, seed=3).inputs
        expected = (1 - t if direction == "to_data" else t) * scale
        torch.testing.assert_close(inputs["timestep"], expected)


def test_sit_sees_data_at_time_1_and_predicts_data_minus_noise():
    """arXiv:2401.08740 sec. 2 with its released code's times: x_t = t x + (1 - t) noise."""
    path = flow("to_data", 1.0)
    prepared = prepare(path, NUMBERS, seed=3)
    clean = built(path).clean_tokens(batch_of(NUMBERS).fields, SampleRNG(3, NUMBERS))
    noise = SampleRNG(3, NUMBERS).normal("noise", (6, 4))
    t = prepared.inputs["timestep"][:, None, None]
    expected = t * clean + (1 - t) * noise
    torch.testing.assert_close(prepared.inputs["tokens"], expected, rtol=0, atol=1e-6)
    assert torch.equal(prepared.targets["velocity"], clean - noise)


def drawn(path, sampler, guidance, steps=5):
    with torch.no_grad():
        weak = Network(1).written(path)
        if guidance.weak:
            guidance = Guidance(
                guidance.scale,
                weak=lambda x, t, given: weak({"tokens": x, "timestep": t, **given}),
            )
        return generate(
            Network().written(path),
            built(path),
            {"labels": torch.tensor([1, 5, 2])},
            torch.arange(3),
            seed=0,
            sampler=sampler_of(path, sampler),
            steps=steps,
            guidance=guidance,
        )


GUIDANCES = {
    "none": Guidance(),
    "some channels": Guidance(3.0, channels=3),
    "interval": Guidance(3.0, interval=(0.2, 0.6)),
    "rescaled": Guidance(3.0, rescale=0.7),
    "worse network": Guidance(3.0, weak=print),
}


@pytest.mark.parametrize("guided", GUIDANCES)
@pytest.mark.parametrize("sampler", OWN)
def test_samplers_draw_the_same(sampler, guided):
    assert set(OWN) == set(catalog.SAMPLERS["rectified_flow"])
    check_samples(sampler, GUIDANCES[guided])


@pytest.mark.parametrize("sampler", DIFFUSERS)
def test_schedulers_of_diffusers_draw_the_same(sampler):
    check_samples(sampler, GUIDANCES["some channels"])


def check_samples(sampler, guidance):
    expected = drawn(flow(), sampler, guidance)
    # It is a drawn sample, and guidance moved it.
    assert expected.std() > 0.1
    plain = drawn(flow(), sampler, Guidance())
    assert (guidance.scale == 1) == torch.equal(plain, expected)
    for direction, scale in OTHERS:
        for learn_sigma in (False, True):
            path = flow(direction, scale, learn_sigma=learn_sigma)
            found = drawn(path, sampler, guidance)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_previews_are_the_same_picture(tmp_path):
    sampling = SamplingConfig(num=4, steps=3, cfg_scale=2.0)
    pictures = []
    for path in (flow(), flow("to_data", 1.0, learn_sigma=True)):
        given = built(path), sampling, 0, DataShare(torch.device("cpu"))
        with torch.no_grad():
            previews.preview(Network().written(path), *given).write(tmp_path / "a.png")
        picture = Image.open(tmp_path / "a.png").convert("L")
        pictures.append(torch.tensor(np.asarray(picture)).int())
    assert (pictures[0] - pictures[1]).abs().max() <= 1
    assert pictures[0].unique().numel() > 3


def test_what_learn_sigma_adds_is_not_trained():
    path = RectifiedFlowConfig(learn_sigma=True)
    prepared = prepare(path, NUMBERS, pixels=2)
    prediction = torch.randn(8, 6, 16, requires_grad=True)
    loss = built(path, pixels=2).loss({"prediction": prediction}, prepared.targets)
    plain = prepare(RectifiedFlowConfig(), NUMBERS, pixels=2)
    # Two pixels of eight values: four of the velocity, four that are ignored.
    pixels = prediction.unflatten(-1, (2, 8))
    velocity = {"prediction": pixels[..., :4].flatten(2)}
    expected = built(RectifiedFlowConfig(), pixels=2).loss(velocity, plain.targets)
    torch.testing.assert_close(loss, expected)
    (gradient,) = torch.autograd.grad(loss.sum(), prediction)
    gradient = gradient.unflatten(-1, (2, 8))
    assert gradient[..., 4:].abs().max() == 0
    assert gradient[..., :4].abs().min() > 0


def test_a_network_of_the_other_direction_cannot_guide():
    ours, theirs = built(flow()), built(flow("to_data"))
    with pytest.raises(UserError, match=r'direction="to_data", but --run with "to_noise"'):
        sample_inputs.check_guide("weak", ours, theirs)
    with pytest.raises(UserError, match=r"time_scale=1.0, but --run with 1000.0"):
        sample_inputs.check_guide("weak", ours, built(flow(time_scale=1.0)))
    sample_inputs.check_guide("weak", ours, built(flow(learn_sigma=True)))


OTHER_DATA = {
    "scale": (
        {"scale": 0.5},
        r"0 with scale 0\.5 and shift 0, but --run on latents .* scale 1 and",
    ),
    "shift": (
        {"shift": (0.0, 1.0)},
        "shift 0, 1, but --run on latents .* with scale 1 and shift 0",
    ),
    "autoencoder": ({"vae": VAEFacts(kind="B", digest="0" * 64, factor=2)}, "of B 0{12} with"),
    "classes": ({"class_names": ("b", "a")}, 'has "b" as class 0, but --run as class 1'),
}


@pytest.mark.parametrize("case", OTHER_DATA)
def test_a_network_of_other_data_cannot_guide(case):
    changed, words = OTHER_DATA[case]
    ours = built(flow())
    known = replace(
        ours.data, vae=VAEFacts(kind="A", digest="0" * 64, factor=2), class_names=("a", "b")
    )
    ours = replace(ours, data=known)
    with pytest.raises(UserError, match=words):
        sample_inputs.check_guide("weak", ours, replace(ours, data=replace(known, **changed)))
    # Of imported weights neither is known, and a dataset may store scaled latents.
    for names in ((), ("A", "B")):
        imported = replace(known, vae=None, class_names=names, scale=0.5)
        sample_inputs.check_guide("weak", ours, replace(ours, data=imported))
