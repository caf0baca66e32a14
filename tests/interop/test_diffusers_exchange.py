"""Folders of Z-Image, FLUX.2 and Wan: `convert` both ways; pipelines draw what `sample` draws."""

import json
from pathlib import Path

import pytest
import tiny_vae
import torch
from exports import CPU, DIRECTIONS, NETWORKS, converted
from exports import save_network as save_run
from safetensors.torch import load_file, save_file

from titan_dit.checkpoint.record import read_record
from titan_dit.commands.flags import SampleFlags
from titan_dit.commands.sample_inputs import low_expert
from titan_dit.config.section import UserError
from titan_dit.diffusion import drawing
from titan_dit.diffusion.guidance import Guidance
from titan_dit.execution import first_of
from titan_dit.interop import diffusers_network, hugging_face
from titan_dit.pictures import autoencoder
from titan_dit.pictures.library import diffusers
from titan_dit.trained_model import load_trained

BY_SIZE = {
    "z_image": {"shift_by_tokens": "exponential"},
    "flux2": {"shift_by_tokens": "flux2"},  # It depends on the steps, too.
}
EACH = pytest.mark.parametrize("name", list(NETWORKS))


@pytest.fixture(scope="module")
def library():
    return diffusers("the test")


@pytest.fixture(scope="module")
def vaes(library, tmp_path_factory):
    """The folder of a tiny autoencoder for each network."""
    folder = tmp_path_factory.mktemp("vaes")
    sizes = {"latent_channels": 4, "scaling_factor": 0.7, "shift_factor": 0.2}
    return {
        "z_image": Path(tiny_vae.save_vae(folder / "z_image", **sizes)),
        "flux2": Path(tiny_vae.save_flux2_vae(folder / "flux2")),
        "wan": Path(tiny_vae.save_wan_vae(folder / "wan")),
    }


def opened(library, folder):
    pipeline = library.DiffusionPipeline.from_pretrained(folder, text_encoder=None, tokenizer=None)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def edit(file, **changes):
    """Change keys of a JSON file; None removes one."""
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))


def randn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def drawn_by(run, given, null, noise, scale, low=None):
    """Ten Euler steps, in the units of the autoencoder's latents."""
    diffusion = run.diffusion("test")
    with torch.no_grad():
        tokens = drawing.generate(
            lambda inputs, static: first_of(run.network(inputs, static)),
            diffusion,
            given,
            torch.arange(len(noise)),
            seed=0,
            sampler=drawing.sampler_of(diffusion.config, "euler"),
            steps=10,
            guidance=Guidance(scale),
            noise=diffusion.model.tokenize(noise),
            null=null,
            low=low,
        )
    return diffusion.data.to_stored_units(diffusion.model.detokenize(tokens))


def caption(embedding, tokens):
    """The network's inputs for two samples with this embedding."""
    padded = torch.nn.functional.pad(embedding, (0, 0, 0, tokens - len(embedding)))
    return {
        "text": padded.expand(2, -1, -1),
        "text_length": torch.full((2,), len(embedding)),
    }


SHIFTS = ["plain", "3", "by size"]


def assert_same_pictures(pipeline, run, latents, pictures):
    vae = autoencoder.load(str(run.diffusion("test").data.vae_source), CPU)
    drawn = (vae.decoded(latents) / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1)
    assert (drawn - torch.from_numpy(pictures)).abs().max() <= 1e-4
    assert 0.05 < drawn.std() < 1


@pytest.mark.parametrize("objective", [{}, {"shift": 3.0}, BY_SIZE["z_image"]], ids=SHIFTS)
def test_an_exported_z_image_draws_what_sample_draws(library, vaes, tmp_path, objective):
    run_path = save_run(tmp_path / "run", "z_image", vaes["z_image"], objective)
    pipeline = opened(library, converted(run_path, tmp_path / "pipeline"))
    assert type(pipeline).__name__ == "ZImagePipeline"
    run = load_trained(run_path, "ema", None, CPU)
    noise, text, other = randn(2, 4, 8, 12, seed=1), randn(9, 20, seed=2), randn(5, 20, seed=3)
    pictures = pipeline(
        prompt_embeds=[text, text],
        negative_prompt_embeds=[other, other],
        guidance_scale=2.0,
        height=16,
        width=24,
        num_inference_steps=10,
        latents=noise.clone(),
        output_type="np",
    ).images
    # Its scale counts from the conditional prediction.
    latents = drawn_by(run, caption(text, 32), caption(other, 32), noise, 3.0)
    assert_same_pictures(pipeline, run, latents, pictures)


@pytest.mark.parametrize("objective", [{}, {"shift": 3.0}, BY_SIZE["flux2"]], ids=SHIFTS)
def test_an_exported_flux2_draws_what_sample_draws(library, vaes, tmp_path, objective):
    run_path = save_run(tmp_path / "run", "flux2", vaes["flux2"], objective)
    pipeline = opened(library, converted(run_path, tmp_path / "pipeline"))
    assert type(pipeline).__name__ == "Flux2KleinPipeline"
    run = load_trained(run_path, "ema", None, CPU)
    noise, text, other = randn(2, 8, 4, 6, seed=1), randn(11, 20, seed=2), randn(11, 20, seed=3)
    pictures = pipeline(
        prompt_embeds=text.expand(2, -1, -1),
        negative_prompt_embeds=other.expand(2, -1, -1),
        guidance_scale=3.0,
        height=16,
        width=24,
        num_inference_steps=10,
        latents=noise.clone(),
        output_type="np",
    ).images
    latents = drawn_by(run, caption(text, 11), caption(other, 11), noise, 3.0)
    assert_same_pictures(pipeline, run, latents, pictures)


def clips_of(library, pipeline, shift, text, other, noise):
    """Clips that a pipeline of Wan draws by ten steps of Euler's method, at the times of `sample`.

    UniPC's steps are of another method, and the network is given whole numbers as their times.
    """
    scheduler = library.FlowMatchEulerDiscreteScheduler(shift=shift)
    pipeline.scheduler, set_timesteps = scheduler, scheduler.set_timesteps
    sigmas = torch.linspace(1, 0.1, 10).tolist()
    scheduler.set_timesteps = lambda _, device: set_timesteps(sigmas=sigmas, device=device)
    return pipeline(
        prompt_embeds=text,
        negative_prompt_embeds=other,
        guidance_scale=3.0,
        height=16,
        width=32,
        num_frames=5,
        num_inference_steps=10,
        latents=noise.clone(),
        output_type="np",
    ).frames


def assert_same_clips(run, latents, clips):
    vae = autoencoder.load(str(run.diffusion("test").data.vae_source), CPU)
    drawn = (vae.decoded(latents) / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 4, 1)
    assert (drawn - torch.from_numpy(clips)).abs().max() <= 1e-4
    assert 0.05 < drawn.std() < 1


def captions_of_wan():
    """Two prompts, padded with zeros, and their noise."""
    prompts = [caption(randn(tokens, 20, seed=tokens), 24) for tokens in (9, 5)]
    return *prompts, randn(2, 4, 2, 4, 8, seed=1)


def test_an_exported_wan_draws_what_sample_draws(library, vaes, tmp_path):
    run_path = save_run(tmp_path / "run", "wan", vaes["wan"], {"shift": 3.0})
    pipeline = opened(library, converted(run_path, tmp_path / "pipeline"))
    assert type(pipeline).__name__ == "WanPipeline"
    assert type(pipeline.scheduler).__name__ == "UniPCMultistepScheduler"
    config = pipeline.scheduler.config
    assert (config.flow_shift, config.prediction_type) == (3.0, "flow_prediction")
    # Its times are whole numbers, those of the shift.
    pipeline.scheduler.set_timesteps(10)
    times = torch.linspace(1, 1e-3, 11)[:-1]
    shifted = 3 * times / (1 + 2 * times)
    assert (pipeline.scheduler.timesteps - 1000 * shifted).abs().max() <= 1
    run = load_trained(run_path, "ema", None, CPU)
    given, null, noise = captions_of_wan()
    clips = clips_of(library, pipeline, 3.0, given["text"], null["text"], noise)
    assert clips.shape == (2, 5, 16, 32, 3)
    assert_same_clips(run, drawn_by(run, given, null, noise, 3.0), clips)


def test_two_experts_are_one_pipeline(library, vaes, tmp_path):
    levels = {"high": {"t_min": 0.875}, "low": {"t_max": 0.875}}
    runs = {
        name: save_run(tmp_path / name, "wan", vaes["wan"], {"shift": 2.0} | own, seed=number)
        for number, (name, own) in enumerate(levels.items())
    }
    folder = converted(runs["high"], tmp_path / "pipeline", low=str(runs["low"]))
    pipeline = opened(library, folder)
    assert pipeline.config.boundary_ratio == 0.875
    high, low = (load_trained(runs[name], "ema", None, CPU) for name in levels)
    given, null, noise = captions_of_wan()
    clips = clips_of(library, pipeline, 2.0, given["text"], null["text"], noise)
    expert = low_expert(low, high.diffusion("test"), SampleFlags(run="", out=""))
    latents = drawn_by(high, given, null, noise, 3.0, expert)
    assert_same_clips(high, latents, clips)
    assert (drawn_by(high, given, null, noise, 3.0) - latents).abs().max() > 1e-2
    # Each comes back, with its noise levels.
    for name, own in levels.items():
        back = converted(folder, tmp_path / f"{name} again", expert=name)
        objective = read_record(back)["config"]["objective"]
        assert {key: objective[key] for key in ("shift", *own)} == {"shift": 2.0} | own
        ours = load_trained(runs[name], "ema", None, CPU).network.state_dict()
        for key, tensor in load_trained(back, "ema", None, CPU).network.state_dict().items():
            assert torch.equal(tensor, ours[key]), key
    without = converted(folder, tmp_path / "first")
    assert read_record(without)["config"]["objective"]["t_min"] == 0.875
    again = converted(tmp_path / "high again", tmp_path / "again", low=str(tmp_path / "low again"))
    for file in (file.relative_to(folder) for file in folder.rglob("*") if file.is_file()):
        assert (again / file).read_bytes() == (folder / file).read_bytes(), file


def test_experts_that_do_not_fit_each_other_are_refused_by_name(vaes, tmp_path):
    high = save_run(tmp_path / "high", "wan", vaes["wan"], {"t_min": 0.875})
    others = {
        "a network of other sizes": {"intermediate_size": 64, "objective": {"t_max": 0.875}},
        "a shift of 2, --input of 1": {"objective": {"t_max": 0.875, "shift": 2.0}},
        "which do not meet. Give --boundary": {"objective": {"t_max": 0.8}},
        "exchange them": {"objective": {"t_min": 0.9}, "high": {"t_max": 0.8}},
    }
    for number, (words, given) in enumerate(others.items()):
        objective, own = given.pop("objective"), given.pop("high", None)
        low = save_run(tmp_path / f"low{number}", "wan", vaes["wan"], objective, **given)
        run = save_run(tmp_path / f"high{number}", "wan", vaes["wan"], own) if own else high
        with pytest.raises(UserError, match=words) as caught:
            converted(run, tmp_path / "x", low=str(low))
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="needs an autoencoder"):
        converted(high, tmp_path / "x", low=str(high), vae="none")
    flux = save_run(tmp_path / "flux", "flux2", vaes["flux2"])
    with pytest.raises(UserError, match="Flux2KleinPipeline has one network"):
        converted(flux, tmp_path / "x", low=str(flux))
    alone = converted(high, tmp_path / "alone")
    with pytest.raises(UserError, match="--expert low: the pipeline has one network"):
        converted(alone, tmp_path / "x", expert="low")
    edit(alone / "model_index.json", transformer_2=["diffusers", "WanTransformer3DModel"])
    for ratio in (1.5, "0.9", None):
        edit(alone / "model_index.json", boundary_ratio=ratio)
        with pytest.raises(UserError, match="boundary_ratio"):
            converted(alone, tmp_path / "x")
    assert not (tmp_path / "x").exists()


@EACH
def test_weights_come_back_bit_for_bit(library, vaes, tmp_path, name):
    run_path = save_run(tmp_path / "run", name, vaes[name], {"shift": 2.5})
    first = converted(run_path, tmp_path / "first")
    back = converted(first, tmp_path / "back")
    again = converted(back, tmp_path / "again")
    files = {file.relative_to(first) for file in first.rglob("*") if file.is_file()}
    assert {str(file) for file in files} >= {"model_index.json", "scheduler/scheduler_config.json"}
    for file in files:
        assert (again / file).read_bytes() == (first / file).read_bytes(), file
    record, kind = read_record(back), NETWORKS[name][0]
    assert record["config"]["objective"]["shift"] == 2.5
    assert record["config"]["objective"]["direction"] == DIRECTIONS[name]
    assert record["data"]["vae"]["digest"] == autoencoder.load(str(vaes[name]), CPU).facts.digest
    # The folder that diffusers itself writes is read, too.
    opened(library, first).transformer.save_pretrained(tmp_path / "theirs")
    theirs = converted(tmp_path / "theirs", tmp_path / "alone")
    ours = converted(theirs, tmp_path / "out", vae="none")
    expected = load_file(first / "transformer" / diffusers_network.WEIGHTS)
    found = load_file(ours / diffusers_network.WEIGHTS)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
    run = load_trained(theirs, "ema", None, CPU)
    assert type(run.model_config) is kind


@pytest.mark.parametrize("name", BY_SIZE)
def test_the_shift_by_size_is_the_pipelines(vaes, tmp_path, name):
    run_path = save_run(tmp_path / "run", name, vaes[name], BY_SIZE[name])
    pipeline = converted(run_path, tmp_path / "pipeline")
    config = json.loads((pipeline / "scheduler" / "scheduler_config.json").read_text())
    assert (config["use_dynamic_shifting"], config["shift"]) == (True, 1.0)
    found = read_record(converted(pipeline, tmp_path / "back"))["config"]["objective"]
    assert (found["shift_by_tokens"], found["shift"]) == (BY_SIZE[name]["shift_by_tokens"], 1.0)
    # Another one is fixed at the run's size: 24 tokens.
    other = {"shift": 2.0, "shift_by_tokens": "sqrt"}
    run_path = save_run(tmp_path / "sqrt", name, vaes[name], other)
    scheduler = converted(run_path, tmp_path / "fixed") / "scheduler" / "scheduler_config.json"
    config = json.loads(scheduler.read_text())
    assert config["use_dynamic_shifting"] is False
    assert config["shift"] == pytest.approx(2 * (24 / 256) ** 0.5)


def test_a_text_encoder_is_copied_or_left_out(library, vaes, tmp_path):
    run_path = save_run(tmp_path / "run", "z_image", vaes["z_image"])
    index = json.loads((converted(run_path, tmp_path / "without") / "model_index.json").read_text())
    assert index["text_encoder"] == index["tokenizer"] == [None, None]
    words = "Flags? text_encoder"
    source = tmp_path / "source"
    files = {
        "text_encoder/config.json": json.dumps({"architectures": ["Qwen3Model"]}),
        "text_encoder/model.safetensors": words,
        "tokenizer/tokenizer_config.json": json.dumps({"tokenizer_class": "Qwen2Tokenizer"}),
        "tokenizer/tokenizer.json": "{}",
    }
    for file, text in files.items():
        (source / file).parent.mkdir(parents=True, exist_ok=True)
        (source / file).write_text(text)
    whole = converted(run_path, tmp_path / "whole", text_encoder=str(source))
    index = json.loads((whole / "model_index.json").read_text())
    assert index["text_encoder"] == ["transformers", "Qwen3Model"]
    assert index["tokenizer"] == ["transformers", "Qwen2Tokenizer"]
    assert all((whole / file).read_text() == text for file, text in files.items())
    edit(source / "tokenizer" / "tokenizer_config.json", tokenizer_class=7)
    with pytest.raises(UserError, match=r"tokenizer_config\.json names no class"):
        converted(run_path, tmp_path / "x", text_encoder=str(source))
    (source / "tokenizer" / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match=r"--text-encoder \S+: tokenizer: "):
        converted(run_path, tmp_path / "x", text_encoder=str(source))
    with pytest.raises(UserError, match=r"has no folder text_encoder\. Give the folder"):
        converted(run_path, tmp_path / "x", text_encoder=str(tmp_path))
    assert not (tmp_path / "x").exists()


def test_a_distilled_network_is_imported_with_a_warning(vaes, tmp_path, capsys):
    flux = converted(save_run(tmp_path / "f", "flux2", vaes["flux2"]), tmp_path / "klein")
    converted(flux, tmp_path / "base")
    assert "warning" not in capsys.readouterr().out
    edit(flux / "model_index.json", is_distilled=True)
    converted(flux, tmp_path / "klein_run")
    assert "distilled to draw in few steps (is_distilled in model_i" in capsys.readouterr().out
    z = converted(save_run(tmp_path / "z", "z_image", vaes["z_image"]), tmp_path / "Z-Image-Turbo")
    converted(z, tmp_path / "turbo_run")
    assert "distilled to draw in few steps (turbo in its name)" in capsys.readouterr().out


FOREIGN = {
    "another class": ("z_image", {"_class_name": "QwenImageTransformer2DModel"}, "QwenImageTr"),
    "a class that is a list": ("z_image", {"_class_name": ["a"]}, "is of \\['a'\\], not one of"),
    "siglip": ("z_image", {"siglip_feat_dim": 1152}, "siglip_feat_dim=1152; our Z-Image has None"),
    "another epsilon": ("z_image", {"norm_eps": 1e-6}, "norm_eps=1e-06; our Z-Image has 1e-05"),
    "pictures to begin with": ("wan", {"image_dim": 1280}, "image_dim=1280; our Wan has None"),
    "their keys": ("wan", {"added_kv_proj_dim": 5120}, "added_kv_proj_dim=5120; our Wan has None"),
    "norms of heads": (
        "wan",
        {"qk_norm": "rms_norm"},
        "qk_norm='rms_norm'; our Wan has 'rms_norm_a",
    ),
    "no norm before the text": ("wan", {"cross_attn_norm": False}, "cross_attn_norm=False; our Wa"),
    "two frames a token": (
        "wan",
        {"patch_size": [2, 2, 2]},
        r"patch_size=\[2, 2, 2\]; our Wan has",
    ),
    "a patch of one number": ("wan", {"patch_size": [2]}, r"patch_size=\[2\]; our Wan has \[1, p"),
    "other outputs": ("wan", {"out_channels": 8}, "out_channels=8; our Wan has 4"),
    "grouped queries": ("z_image", {"n_kv_heads": 1}, "n_kv_heads=1; our Z-Image has 3"),
    "two patches": ("z_image", {"all_patch_size": [2, 4]}, r"all_patch_size=\[2, 4\]; our Z-I"),
    "no patch": ("z_image", {"all_patch_size": []}, r"patch_size=0 must be at least 1"),
    "another time": ("z_image", {"t_scale": 1.0}, "t_scale=1.0; our Z-Image has 1000.0"),
    "a width that is a word": ("z_image", {"dim": "48"}, 'config.json: dim="48" must be a whole'),
    "no layers": ("z_image", {"n_layers": 0}, "n_layers=0 must be at least 1"),
    "too many layers": ("z_image", {"n_layers": 10**9}, "n_layers=1000000000 must be at most"),
    "axes": ("z_image", {"axes_dims": [8, 4, 2]}, r"rope_axes=\[8, 4, 2\]"),
    "no width": ("z_image", {"dim": None}, "config.json lacks dim"),
    "another width": ("z_image", {"cap_feat_dim": 24}, r"wrong shape: cap_embedder\.0\.weight"),
    "one layer less": ("z_image", {"n_layers": 1}, "layers.1"),
    "outputs": ("flux2", {"out_channels": 4}, "out_channels=4; our FLUX.2 has 8"),
    "patches": ("flux2", {"patch_size": 2}, "patch_size=2; our FLUX.2 has 1"),
    "guidance": ("flux2", {"guidance_embeds": True}, "guidance_embedder"),
    "a ratio": ("flux2", {"mlp_ratio": float("nan")}, "config.json"),
    "heads": ("flux2", {"num_attention_heads": 10**6}, "num_attention_heads=1000000 must be at"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_another_network_is_refused_in_one_line(case, vaes, tmp_path):
    name, changes, words = FOREIGN[case]
    run_path = save_run(tmp_path / "run", name, vaes[name])
    folder = converted(run_path, tmp_path / "folder", vae="none")
    edit(folder / "config.json", **changes)
    with pytest.raises(UserError, match=words) as caught:
        converted(folder, tmp_path / "x")
    # A list of tensors has a line for each.
    assert "\n" not in str(caught.value) or "do not match" in str(caught.value)
    assert not (tmp_path / "x").exists()


SCHEDULERS = {
    "noise predicted": (
        {"prediction_type": "epsilon"},
        "prediction_type='epsilon'; .objective. re",
    ),
    "sigmas of no flow": (
        {"use_flow_sigmas": False},
        "use_flow_sigmas=False; .objective. rectified",
    ),
    "another shift": ({"flow_shift": -1}, "flow_shift=-1 must be a number above 0"),
    "karras in UniPC": ({"use_karras_sigmas": True}, "use_karras_sigmas=True: not supported"),
    "another class": ({"_class_name": "DDIMScheduler"}, "is of 'DDIMScheduler', not of FlowMatch"),
    "karras": ({"use_karras_sigmas": True}, "use_karras_sigmas=True: not supported"),
    "an end": ({"shift_terminal": 0.02}, "shift_terminal=0.02: not supported"),
    "a word": ({"shift": "3"}, "shift='3' must be a number above 0"),
    "no number": ({"shift": float("nan")}, "shift|NaN"),
    "steps": ({"num_train_timesteps": 10}, "num_train_timesteps=10: the network has 1000"),
    "other tokens": (
        {"use_dynamic_shifting": True, "max_shift": 1.0},
        "max_shift=1.0; .objective. shift_by_tokens has 1.15",
    ),
}


@pytest.mark.parametrize("case", SCHEDULERS)
def test_a_scheduler_of_other_times_is_refused_by_name(case, vaes, tmp_path):
    changes, words = SCHEDULERS[case]
    name = "wan" if list(SCHEDULERS).index(case) < 4 else "flux2"
    folder = converted(save_run(tmp_path / "run", name, vaes[name]), tmp_path / "pipeline")
    edit(folder / "scheduler" / "scheduler_config.json", **changes)
    with pytest.raises(UserError, match=words) as caught:
        converted(folder, tmp_path / "x")
    assert "\n" not in str(caught.value)


def test_what_a_pipeline_cannot_do_is_refused_by_name(vaes, tmp_path):
    wrong = save_run(tmp_path / "wrong", "z_image", vaes["z_image"], {"direction": "to_noise"})
    words = r'direction="to_noise", time_scale=1000.0: ZImagePipeline samples .* "to_data"'
    with pytest.raises(UserError, match=words):
        converted(wrong, tmp_path / "x")
    assert (converted(wrong, tmp_path / "alone", vae="none") / "config.json").is_file()
    guided = save_run(tmp_path / "guided", "flux2", vaes["flux2"], guidance=4.0)
    with pytest.raises(UserError, match="guidance=4: Flux2KleinPipeline gives the network no"):
        converted(guided, tmp_path / "x")
    alone = converted(guided, tmp_path / "dev", vae="none")
    back = read_record(converted(alone, tmp_path / "dev_run"))
    assert back["config"]["model"]["guidance"] == 4.0
    other = save_run(tmp_path / "run", "flux2", vaes["flux2"])
    with pytest.raises(UserError, match="--as-is is not a flag of an export to diffusers"):
        converted(other, tmp_path / "x", as_is=True)
    with pytest.raises(UserError, match="name for diffusers a folder without a suffix"):
        converted(other, tmp_path / "x.safetensors")
    with pytest.raises(UserError, match=r"--vae \S+ is AutoencoderKL \w+, but the latents were"):
        converted(other, tmp_path / "x", vae=str(vaes["z_image"]))
    assert not list(tmp_path.glob("x*"))


def test_units_that_the_pipeline_lacks_are_refused(vaes, tmp_path):
    run_path = save_run(tmp_path / "run", "z_image", vaes["z_image"])
    other = tmp_path / "vae"
    other.mkdir()
    for file in vaes["z_image"].iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    edit(other / "config.json", shift_factor=0.5)
    words = "scale 0.7 and shift 0.5, which ZImagePipeline takes, but the run's .* shift 0.2"
    with pytest.raises(UserError, match=words):
        converted(run_path, tmp_path / "x", vae=str(other))


def test_an_autoencoder_of_another_width_is_refused(vaes, tmp_path):
    folder = converted(save_run(tmp_path / "run", "flux2", vaes["flux2"]), tmp_path / "pipeline")
    for file in (folder / "vae").iterdir():
        file.unlink()
    for file in vaes["z_image"].iterdir():
        (folder / "vae" / file.name).write_bytes(file.read_bytes())
    with pytest.raises(UserError, match="its vae has 4 latent channels, its transformer takes 8"):
        converted(folder, tmp_path / "x")


@EACH
def test_weights_in_shards_are_read_and_written(vaes, tmp_path, monkeypatch, name):
    run_path = save_run(tmp_path / "run", name, vaes[name])
    whole = converted(run_path, tmp_path / "whole", vae="none")
    monkeypatch.setattr(hugging_face, "LARGEST_SHARD", 100_000)
    sharded = converted(run_path, tmp_path / "sharded", vae="none")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    back = converted(converted(sharded, tmp_path / "back"), tmp_path / "again", vae="none")
    found = hugging_face.read_weights(back, (diffusers_network.WEIGHTS,))
    for key, tensor in load_file(whole / diffusers_network.WEIGHTS).items():
        assert torch.equal(found[key], tensor), key


def test_weights_in_bf16_come_back_with_every_bit(vaes, tmp_path):
    folder = converted(
        save_run(tmp_path / "run", "flux2", vaes["flux2"]), tmp_path / "folder", vae="none"
    )
    file = folder / diffusers_network.WEIGHTS
    halves = {key: tensor.bfloat16() for key, tensor in load_file(file).items()}
    save_file(halves, file)
    back = converted(converted(folder, tmp_path / "back"), tmp_path / "again", vae="none")
    for key, tensor in load_file(back / diffusers_network.WEIGHTS).items():
        assert torch.equal(tensor, halves[key].float()), key
