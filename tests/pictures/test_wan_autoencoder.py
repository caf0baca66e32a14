"""Wan's autoencoder of clips: units per channel, a latent frame for every four frames."""

import json
from pathlib import Path

import pytest
import tiny_vae
import torch
from refusals import refused

from titan_dit.config.section import UserError
from titan_dit.data.latent_facts import LatentFacts
from titan_dit.pictures import autoencoder
from titan_dit.pictures.autoencoder import as_pixels
from titan_dit.pictures.library import diffusers

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_vae.save_wan_vae(tmp_path_factory.mktemp("vae"))


@pytest.fixture(scope="module")
def theirs(folder):
    return diffusers("the test").AutoencoderKLWan.from_pretrained(folder).eval()


def clip(frames, *, num=2, height=16, width=24):
    generator = torch.Generator().manual_seed(frames)
    return torch.randint(
        256, (num, 3, frames, height, width), dtype=torch.uint8, generator=generator
    )


def test_latents_are_those_of_diffusers_and_units_those_of_its_pipeline(folder, theirs):
    vae = autoencoder.load(folder, CPU)
    assert (vae.channels, vae.facts.factor, vae.facts.frames_factor) == (4, 4, 4)
    facts = LatentFacts(
        shape=(4, 3, 4, 6), count=1, num_classes=1, scale=vae.scale, shift=vae.shift
    )
    with torch.no_grad():
        for frames in (1, 5, 9):
            pixels = clip(frames)
            mean, std = vae.encode(pixels)
            posterior = theirs.encode(pixels.float() / 127.5 - 1).latent_dist
            assert mean.shape == (2, 4, 1 + (frames - 1) // 4, 4, 6)
            assert torch.equal(mean, posterior.mean)
            assert torch.equal(std, posterior.std)
            assert torch.equal(vae.decoded(mean), theirs.decode(posterior.mean).sample)
            assert torch.equal(vae.decode(mean), as_pixels(theirs.decode(posterior.mean).sample))
            # As WanPipeline takes what its network has drawn.
            config = theirs.config
            middle, spread = (
                torch.tensor(config[key]).view(1, -1, 1, 1, 1)
                for key in ("latents_mean", "latents_std")
            )
            expected = (posterior.mean - middle) / spread
            torch.testing.assert_close(facts.to_model_units(mean), expected)


def test_a_picture_is_a_clip_of_one_frame(folder):
    vae = autoencoder.load(folder, CPU)
    pixels = clip(1)
    of_picture, of_clip = vae.encode(pixels[:, :, 0]), vae.encode(pixels)
    assert all(torch.equal(a, b) for a, b in zip(of_picture, of_clip, strict=True))
    latents = of_clip[0]
    assert torch.equal(vae.decoded(latents[:, :, 0]), vae.decoded(latents)[:, :, 0])


def test_no_frame_depends_on_a_later_one(folder):
    """Causal in time: a clip's first frames have the latents of the shorter clip."""
    vae = autoencoder.load(folder, CPU)
    pixels = clip(9)
    whole, _ = vae.encode(pixels)
    begin, _ = vae.encode(pixels[:, :, :5])
    torch.testing.assert_close(whole[:, :, :2], begin)
    assert not torch.allclose(whole[:, :, 2], whole[:, :, 1])


def test_bfloat16_has_another_precision_and_the_same_digest(folder):
    exact, half = autoencoder.load(folder, CPU), autoencoder.load(folder, CPU, dtype="bfloat16")
    assert half.facts == exact.facts
    assert (exact.entry.get("dtype"), half.entry["dtype"]) == (None, "bfloat16")
    (mean, _), (other, std) = exact.encode(clip(5)), half.encode(clip(5))
    assert other.dtype == std.dtype == half.decoded(other).dtype == torch.float32
    difference = (mean - other).abs().max() / mean.abs().max()
    assert 1e-5 < difference < 0.05


def test_tiles_are_those_of_diffusers(folder):
    pixels = clip(5, num=1, height=272, width=16)
    tiled = autoencoder.load(folder, CPU, tiles="always")
    theirs = diffusers("the test").AutoencoderKLWan.from_pretrained(folder).eval()
    theirs.enable_tiling()
    mean, _ = tiled.encode(pixels)
    with torch.no_grad():
        posterior = theirs.encode(pixels.float() / 127.5 - 1).latent_dist
        assert torch.equal(mean, posterior.mean)
        assert torch.equal(tiled.decoded(mean), theirs.decode(mean).sample)
    whole, _ = autoencoder.load(folder, CPU).encode(pixels)
    assert not torch.equal(whole, mean)


def test_a_clip_that_does_not_fit_is_drawn_in_tiles_from_then_on(folder, capsys):
    vae, tiled = autoencoder.load(folder, CPU), autoencoder.load(folder, CPU, tiles="always")
    latents = tiled.encode(clip(1, num=1, height=272, width=16))[0]
    decode, calls = vae.module.decode, []

    def full_at_first(values):
        calls.append(vae.module.use_tiling)
        if not vae.module.use_tiling:
            raise torch.OutOfMemoryError("full")
        return decode(values)

    vae.module.decode = full_at_first
    for _ in range(2):
        assert torch.equal(vae.decoded(latents), tiled.decoded(latents))
    assert calls == [False, True, True]
    assert capsys.readouterr().err.count("does not fit into the GPU's memory: in tiles") == 1


def test_a_clip_that_does_not_fit_is_not_encoded_unlike_the_others(folder):
    """Latents would depend on which rank runs out of memory."""

    def full(values):
        raise torch.OutOfMemoryError("full")

    vae, tiled = autoencoder.load(folder, CPU), autoencoder.load(folder, CPU, tiles="always")
    vae.module.encode = tiled.module.encode = full
    said = refused(lambda: vae.encode(clip(1, num=1)))
    assert said.endswith("Give --vae-tiles always, or a lower --batch-size.")
    assert not vae.module.use_tiling
    with pytest.raises(torch.OutOfMemoryError):
        tiled.encode(clip(1, num=1))


def test_an_autoencoder_of_pictures_encodes_each_frame_alone(tmp_path):
    vae = autoencoder.load(tiny_vae.save_vae(tmp_path / "vae"), CPU)
    pixels = clip(3)
    mean, std = vae.encode(pixels)
    assert mean.shape == (2, 2, 3, 8, 12)
    for frame in range(3):
        alone, spread = vae.encode(pixels[:, :, frame])
        torch.testing.assert_close(mean[:, :, frame], alone)
        torch.testing.assert_close(std[:, :, frame], spread)
        torch.testing.assert_close(vae.decoded(mean)[:, :, frame], vae.decoded(alone))


WRONG = {
    "another factor of time": (
        {"temperal_downsample": [False, True]},
        "a latent frame of 2 frames",
    ),
    "another factor of space": ({"scale_factor_spatial": 8}, "scale_factor_spatial=8"),
    "a mean too few": ({"latents_mean": [0.1] * 3}, "latents_mean holds 3 numbers for z_dim=4"),
    "a std of 0": ({"latents_std": [0.0] * 4}, "latents_std"),
    "no finite mean": ({"latents_mean": [1e400] * 4}, "latents_mean"),
    "a text as channels": ({"z_dim": "4"}, "z_dim"),
    "more layers than any has": ({"num_res_blocks": 65}, "num_res_blocks"),
    "more levels than any has": ({"dim_mult": [1] * 17}, "more than 16 levels"),
    "more weights than its files": ({"base_dim": 4096}, r"hold [\d,]+ bytes"),
    "a patch of no size": ({"patch_size": 0}, "patch_size"),
    "a list as rate": ({"dropout": [1]}, "no autoencoder can be loaded"),
    "an image's key alone": ({"_class_name": "AutoencoderKL"}, "Give an autoencoder such as"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_config_is_one_line(case, folder, tmp_path):
    changes, words = WRONG[case]
    for file in Path(folder).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(UserError, match=words) as caught:
        autoencoder.load(str(tmp_path), CPU)
    assert str(caught.value).startswith("--vae")
    assert "\n" not in str(caught.value)
