"""From the command line: captioned pictures, their embeddings, and a text-to-image DiT on them."""

import sys

import numpy as np
import pytest
from commands import metrics, run, train_command
from PIL import Image
from tiny_text import CAPTIONS, save_encoder
from tiny_vae import save_vae

CONFIG = """
[job]
name = "captioned"
[model]
name = "joint_dit"
hidden_size = 32
num_layers = 4
num_heads = 4
patch_size = 1
latent_size = [4, 6]
in_channels = 2
text_tokens = 12
text_dim = 32
[objective]
name = "rectified_flow"
condition_dropout = 0.25
shift_by_tokens = "sqrt"
[data]
name = "latents"
path = "latents"
[training]
steps = 4
global_batch_size = 8
microbatch_size = 2
[precision]
dtype = "fp32"
[validation]
every = 2
samples = 8
[checkpoint]
every = 2
[metrics]
every = 1
tensorboard = false
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Forty pictures with a caption beside each, encoded, and a config."""
    folder = tmp_path_factory.mktemp("captioned")
    (folder / "pictures").mkdir()
    for number in range(40):
        pixels = np.random.default_rng(number).integers(0, 256, (8, 12, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "pictures" / f"{number}.png")
        caption = CAPTIONS[number % len(CAPTIONS)]
        (folder / "pictures" / f"{number}.txt").write_text(caption)
    save_vae(folder / "vae")
    save_encoder(folder / "t5")
    (folder / "captioned.toml").write_text(CONFIG)
    words = ["--input", "pictures", "--out", "latents", "--vae", "vae", "--buckets", "12x8"]
    words += ["--text-encoder", "t5", "--text-tokens", "10", "--device", "cpu"]
    done = run([sys.executable, "-m", "titan_dit", "data", "encode", *words], folder)
    assert done.returncode == 0, done.stderr
    return folder


def trained(folder, *flags, ranks=1):
    done = run(train_command(*flags, config="captioned.toml", ranks=ranks), folder)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_a_run_on_captions_resumes_on_a_pipeline_with_the_same_losses(folder):
    trained(folder, "--job.dir", "whole")
    trained(folder, "--job.dir", "parts", "--training.steps", 2)
    trained(folder, "--job.dir", "parts", "--parallel.pp", 2, ranks=2)
    whole, parts = ([r["loss"] for r in metrics(folder / name)] for name in ("whole", "parts"))
    assert len(whole) == 4
    assert parts == pytest.approx(whole, rel=1e-5)


def test_what_needs_classes_refuses_the_run_in_one_line(folder):
    trained(folder, "--job.dir", "drawn", "--training.steps", 2)
    words = ["sample", "--run", "drawn", "--out", "drawn.png"]
    done = run([sys.executable, "-m", "titan_dit", *words], folder)
    assert done.returncode == 2
    [line] = done.stderr.strip().splitlines()[-1:]
    assert line.startswith('error: [model] name="joint_dit" takes captions: it cannot draw classes')
    done = run(train_command("--sampling.every", 2, config="captioned.toml"), folder)
    assert done.returncode == 2
    assert "Prompts are not there yet: set [sampling] every = 0" in done.stderr
    assert "step" not in done.stdout, "before the first step"
