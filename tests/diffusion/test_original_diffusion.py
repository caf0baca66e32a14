"""Parity of losses and samples with the original DiT, see tests/fixtures/README.md."""

from pathlib import Path

import pytest
import torch
from points import built
from safetensors.torch import load_file

from titan_dit.diffusion.drawing import generate
from titan_dit.diffusion.samplers.base import Settings
from titan_dit.diffusion.samplers.discrete import ddim, ddpm
from titan_dit.diffusion.sections import DDPMConfig
from titan_dit.interop import original_dit, tensor_file
from titan_dit.models.dit_config import DiTConfig
from titan_dit.models.layers import patchify, unpatchify

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"
SPACE = load_file(FIXTURES / "ddpm_reference.safetensors")
NETWORK = load_file(FIXTURES / "dit_reference.safetensors")


def stand_in(x, t, channels=8):
    """A latent-space network that is roughly right for standard normal data."""
    s = (t / 1000).view(-1, 1, 1, 1)
    a = (1 - torch.exp(-0.1 * s - 10 * s * s)).sqrt()
    eps = a * x + 0.1 * torch.sin(2 * x.roll(1, 1))
    return torch.cat((eps, torch.tanh(x + a)), 1)[:, :channels]


def of(**keys):
    """The objective of latents with 4 channels."""
    return built(DDPMConfig(**keys), channels=4)


def on_tokens(objective):
    """The stand-in on tokens with patch 2."""

    def predict(tokens, timestep):
        return patchify(
            stand_in(unpatchify(tokens, 2, 4), timestep, objective.config.output_channels(4)), 2
        )

    return predict


def draw(objective, sampler, steps, eta=0.0):
    settings = Settings(steps, eta, lambda step: patchify(SPACE["fresh"][step], 2))
    process = objective.process(on_tokens(objective))
    return unpatchify(sampler(process, patchify(SPACE["z"], 2), settings), 2, 4)


@pytest.mark.parametrize(
    ("name", "objective", "sampler", "steps", "eta"),
    [
        ("ancestral_25", of(), ddpm, 25, 0),
        ("ancestral_7", of(), ddpm, 7, 0),
        ("cosine_ancestral_25", of(noise_schedule="cosine"), ddpm, 25, 0),
        ("x_ancestral_25", of(prediction="x"), ddpm, 25, 0),
        ("fixed_ancestral_25", of(learn_sigma=False), ddpm, 25, 0),
        ("ddim_25", of(), ddim, 25, 0),
        ("ddim_20_eta_half", of(), ddim, 20, 0.5),
    ],
)
def test_samples_are_those_of_the_original(name, objective, sampler, steps, eta):
    found, expected = draw(objective, sampler, steps, eta), SPACE[name]
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def terms(objective, latents, noise, t, network):
    """Every term of the loss and their sum, per sample."""
    corrupted = objective.corrupt(patchify(latents, 2), t.float(), patchify(noise, 2))
    prediction = network(corrupted.inputs["tokens"], corrupted.inputs["timestep"])
    found = dict(objective.terms({"prediction": prediction}, corrupted.targets))
    found["loss"] = objective.loss({"prediction": prediction}, corrupted.targets)
    return {name: term.mean(1) for name, term in found.items()}


@pytest.mark.parametrize(
    ("name", "objective"),
    [("linear", of()), ("cosine", of(noise_schedule="cosine")), ("x", of(prediction="x"))],
)
def test_the_loss_and_its_parts_are_those_of_the_original(name, objective):
    found = terms(objective, SPACE["x0"], SPACE["noise"], SPACE["t"], on_tokens(objective))
    for part in ("mse", "vb", "loss"):
        torch.testing.assert_close(found[part], SPACE[f"{name}_{part}"], rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def imported():
    """The original's network, read from its file."""
    weights = tensor_file.read_weight_file(FIXTURES / "dit_reference.safetensors")
    original = original_dit.infer(weights.model, int(weights.metadata["num_heads"]))
    model = original.config.build(original.output_channels)
    model.load_state_dict(original.to_ours(weights.model))
    return original.config, model


def call(imported, labels):
    config, model = imported
    static = config.static(torch.device("cpu"))

    def network(tokens, timestep):
        inputs = {"tokens": tokens, "timestep": timestep, "labels": labels}
        with torch.no_grad():
            return model(inputs, static)

    return network


def test_the_imported_network_predicts_what_the_original_does(imported):
    assert imported[0] == DiTConfig(
        hidden_size=48,
        num_layers=2,
        num_heads=4,
        patch_size=2,
        latent_size=8,
        in_channels=4,
        num_classes=10,
    )
    network = call(imported, NETWORK["io.y"])
    found = network(patchify(NETWORK["io.x"], 2), NETWORK["io.t"].float())
    expected = NETWORK["io.out"]
    found = imported[0].detokenize(found)
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def test_the_imported_network_has_the_losses_of_the_original(imported):
    network = call(imported, NETWORK["io.y"])
    found = terms(of(), NETWORK["io.x"], NETWORK["io.noise"], NETWORK["io.t"], network)
    for part in ("mse", "vb", "loss"):
        torch.testing.assert_close(found[part], NETWORK[f"io.loss_{part}"], rtol=1e-5, atol=1e-6)


def test_ddim_through_the_imported_network_ends_where_the_original_ends(imported):
    (config, model), section = imported, DDPMConfig()
    with torch.no_grad():
        found = generate(
            model,
            section.build(config, section.example(config)[0]),
            {"labels": NETWORK["io.y"]},
            torch.arange(5),
            seed=0,
            sampler=ddim,
            steps=10,
            noise=config.tokenize(NETWORK["io.ddim_z"]),
        )
    expected = NETWORK["io.ddim10"]
    assert (config.detokenize(found) - expected).abs().max() < 1e-5 * expected.abs().max()
