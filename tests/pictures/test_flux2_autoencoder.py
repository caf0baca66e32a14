"""FLUX.2's autoencoder: 2x2 latent pixels are one of ours, normalised by its `bn`."""

import json
from pathlib import Path

import pytest
import tiny_vae
import torch
from safetensors.torch import load_file, save_file

from titan_dit.config.section import UserError
from titan_dit.data.latent_facts import LatentFacts
from titan_dit.pictures import autoencoder
from titan_dit.pictures.library import diffusers

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_vae.save_flux2_vae(tmp_path_factory.mktemp("vae"))


@pytest.fixture(scope="module")
def theirs(folder):
    return diffusers("the test").AutoencoderKLFlux2.from_pretrained(folder)


def facts_of(vae):
    return LatentFacts(
        shape=(vae.channels, 4, 3), count=1, num_classes=1, scale=vae.scale, shift=vae.shift
    )


def test_latents_are_those_of_diffusers_pipeline(folder, theirs):
    """As `Flux2KleinPipeline` encodes a picture and decodes what it has drawn."""
    pipeline, vae = diffusers("the test").Flux2KleinPipeline, autoencoder.load(folder, CPU)
    assert (vae.channels, vae.facts.factor, vae.facts.kind) == (8, 4, "AutoencoderKLFlux2")
    pictures = torch.randint(256, (2, 3, 16, 12), dtype=torch.uint8)
    mean, std = vae.encode(pictures)
    with torch.no_grad():
        posterior = theirs.encode(pictures.float() / 127.5 - 1).latent_dist
        packed = pipeline._patchify_latents(posterior.mean)
        torch.testing.assert_close(std, pipeline._patchify_latents(posterior.std))
        spread = (theirs.bn.running_var + theirs.config.batch_norm_eps).sqrt().view(1, -1, 1, 1)
        middle = theirs.bn.running_mean.view(1, -1, 1, 1)
        expected = (packed - middle) / spread
        facts = facts_of(vae)
        units = facts.to_model_units(mean)
        torch.testing.assert_close(units, expected, rtol=1e-6, atol=1e-6)
        drawn = torch.randn_like(units)
        decoded = theirs.decode(pipeline._unpatchify_latents(drawn * spread + middle)).sample
    found = vae.decoded(facts.to_stored_units(drawn))
    torch.testing.assert_close(found, decoded, rtol=1e-5, atol=1e-5)


def copied(folder, target, **changes):
    for file in Path(folder).iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | changes))
    return target / "diffusion_pytorch_model.safetensors"


def test_without_its_statistics_it_is_refused(folder, tmp_path):
    weights = copied(folder, tmp_path)
    tensors = {k: v for k, v in load_file(weights).items() if not k.startswith("bn.running")}
    save_file(tensors, weights)
    with pytest.raises(UserError, match=r"--vae \S+ has no bn\.running_\w+, by which"):
        autoencoder.load(str(tmp_path), CPU)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"patch_size": [1, 4]}, r"patch_size=\[1, 4\]; FLUX\.2's pipelines take 2x2"),
        ({"batch_norm_eps": -10.0}, r"batch_norm_eps=-10\.0 must be above 0"),
        ({"patch_size": "2"}, "--vae"),
    ],
)
def test_other_statistics_are_refused_in_one_line(folder, tmp_path, changes, words):
    copied(folder, tmp_path, **changes)
    with pytest.raises(UserError, match=words) as caught:
        autoencoder.load(str(tmp_path), CPU)
    assert "\n" not in str(caught.value)


def test_a_variance_below_zero_is_refused(folder, tmp_path):
    weights = copied(folder, tmp_path)
    tensors = load_file(weights)
    tensors["bn.running_var"][3] = -1
    save_file(tensors, weights)
    with pytest.raises(UserError, match="variance below 0"):
        autoencoder.load(str(tmp_path), CPU)
