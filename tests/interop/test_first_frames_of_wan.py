"""A whole pipeline of Wan I2V A14B goes in, is trained on first frames, and comes out again."""

import sys
from dataclasses import replace

import pytest
import torch
from commands import run
from PIL import Image
from pipelines import opened, save_wan_pipeline
from tiny_text import CAPTIONS

import titan_dit
from titan_dit.pictures.output import save_clip

WAN, EXPERTS = "Wan2.2-I2V-A14B-Diffusers", ("high", "low")
CONFIG = f"""
[model]
name = "wan"
hidden_size = 24
num_layers = 1
num_heads = 2
intermediate_size = 32
in_channels = 16
condition_channels = 20
text_dim = 32
latent_frames = 2
latent_size = [8, 8]
[objective]
name = "rectified_flow"
direction = "to_noise"
shift = 3.0
[data]
name = "latents"
path = "latents"
[training]
steps = 2
global_batch_size = 2
[optimizer]
lr = 1e-2
[precision]
dtype = "fp32"
[checkpoint]
every = 2
allow_changes = true
[metrics]
tensorboard = false
[sampling]
every = 0
prompts = ["{CAPTIONS[0]}"]
"""


def done(folder, *words):
    """Run a command of titan_dit."""
    program = ["titan_dit.train"] if words[0] == "train" else ["titan_dit"]
    rest = words[1:] if words[0] == "train" else words
    found = run([sys.executable, "-m", *program, *rest], folder, timeout=600)
    assert found.returncode == 0, f"{words}\n{found.stdout}{found.stderr}"


def assert_same_predictions(run_of, theirs):
    """Our network of a run predicts what diffusers' does."""
    ours = titan_dit.load(run_of, device="cpu", weights="model")
    config = replace(ours.objective.model, latent_frames=2, latent_size=(8, 8))
    generator, shape = torch.Generator().manual_seed(0), (16, 2, 8, 8)
    noisy = torch.randn(2, *shape, generator=generator)
    given = torch.randn(2, 20, *shape[1:], generator=generator)
    text = torch.randn(2, config.text_tokens, 32, generator=generator)
    timestep = torch.tensor([950.0, 20.0])
    inputs = {
        "tokens": config.tokenize(noisy),
        "condition": config.tokenize(given),
        "timestep": timestep,
        "text": text,
        "text_length": torch.full((2,), config.text_tokens),
    }
    with torch.no_grad():
        found = ours.network(inputs, config.static(torch.device("cpu")))
        wanted = theirs(torch.cat((noisy, given), 1), timestep, text, return_dict=False)[0]
    assert (config.detokenize(found) - wanted).abs().max() < 1e-5 * wanted.abs().max()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_two_experts_given_first_frames_go_in_and_come_out(tmp_path):
    for library in ("av", "diffusers", "transformers"):
        pytest.importorskip(library)
    pipeline = opened(save_wan_pipeline(tmp_path / WAN, first_frame=True))
    (tmp_path / "clips").mkdir()
    for number, caption in enumerate(CAPTIONS):
        generator = torch.Generator().manual_seed(number)
        clip = torch.randint(256, (5, 3, 4, 4), generator=generator, dtype=torch.uint8)
        clip = clip.repeat_interleave(8, 2).repeat_interleave(8, 3)
        save_clip(tmp_path / "clips" / f"{number}.mp4", clip, 16)
        (tmp_path / "clips" / f"{number}.txt").write_text(caption)
    (tmp_path / "i2v.toml").write_text(CONFIG)
    words = f"data encode --input clips --out latents --vae {WAN} --buckets 32x32 --frames 5"
    words += f" --first-frame true --text-encoder {WAN} --text-tokens 512 --device cpu"
    done(tmp_path, *words.split())
    for name, level in zip(EXPERTS, ("t_min", "t_max"), strict=True):
        done(tmp_path, *f"convert --input {WAN} --out in_{name} --expert {name}".split())
        theirs = pipeline.transformer if name == "high" else pipeline.transformer_2
        assert_same_predictions(tmp_path / f"in_{name}", theirs)
        words = f"train --config i2v.toml --job.dir {name} --checkpoint.init in_{name}"
        done(tmp_path, *words.split(), f"--objective.{level}", "0.9")
    words = f"convert --input high --low low --weights model --vae {WAN} --text-encoder {WAN}"
    done(tmp_path, *words.split(), "--out", "exported")
    exported = opened(tmp_path / "exported")
    assert type(exported) is type(pipeline)
    assert exported.config.boundary_ratio == 0.9
    for name, part in zip(EXPERTS, ("transformer", "transformer_2"), strict=True):
        trained, before = getattr(exported, part), getattr(pipeline, part)
        assert dict(trained.config)["in_channels"] == 36
        assert not torch.equal(trained.patch_embedding.weight, before.patch_embedding.weight)
        assert_same_predictions(tmp_path / name, trained)
    text = torch.randn(1, 512, 32, generator=torch.Generator().manual_seed(0))
    clips = [
        exported(
            image=Image.new("RGB", (32, 32), colour),
            prompt_embeds=text,  # Prompts need ftfy in this pipeline.
            negative_prompt_embeds=torch.zeros_like(text),
            height=32,
            width=32,
            num_frames=5,
            num_inference_steps=2,
            generator=torch.Generator().manual_seed(0),
            output_type="pt",
        ).frames
        for colour in ("red", "blue")
    ]
    assert clips[0].shape == (1, 5, 3, 32, 32)
    assert (clips[0] - clips[1]).abs().max() > 1e-3
