"""Types the commands of docs/text-to-video.md with a tiny random pipeline of Wan."""

import re
import shlex
import sys

import pytest
import torch
from commands import ROOT, run
from pipelines import opened, save_wan_pipeline
from tiny_text import CAPTIONS

from titan_dit.pictures.output import save_clip

WAN = "Wan2.1-T2V-1.3B-Diffusers"
SMALLER = {
    "--frames 17,49,81": "--frames 5,9",
    "--frames 17 ": "--frames 5 ",
    "832x480,480x832": "32x32",
    "832x480": "32x32",
    "a red fox runs through snow": CAPTIONS[0],
}
"""What is typed in place of words of the page."""
FLAGS = (
    "--model.hidden_size 24 --model.num_layers 1 --model.num_heads 2 "
    "--model.intermediate_size 32 --model.in_channels 4 --model.text_dim 32 "
    "--model.latent_frames 3 --model.latent_size [8,8] --training.steps 3 "
    "--training.tokens_per_step 96 --training.batch_multiple 2 --training.tokens_per_microbatch 48 "
    "--sampling.every 3 --sampling.steps 2 --checkpoint.every 3 --metrics.every 1 "
    "--precision.dtype fp32 --metrics.tensorboard false"
)
"""Sizes of the tiny network of Wan, and three steps."""


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_weights_of_wan_go_in_and_play_in_its_pipeline(tmp_path):
    pytest.importorskip("av")
    save_wan_pipeline(tmp_path / WAN)
    (tmp_path / "clips").mkdir()
    for number, caption in enumerate(CAPTIONS):
        generator = torch.Generator().manual_seed(number)
        frame = torch.randint(256, (1, 3, 4, 4), generator=generator, dtype=torch.uint8)
        clip = (
            frame.repeat_interleave(8, 2)
            .repeat_interleave(8, 3)
            .repeat(9 - 4 * (number % 2), 1, 1, 1)
        )
        save_clip(tmp_path / "clips" / f"{number}.mp4", clip, 16)
        (tmp_path / "clips" / f"{number}.txt").write_text(caption)
    recipe = (ROOT / "train_configs" / "wan_1_3b.toml").read_text()
    recipe = re.sub(r"(?m)^(size|prompts) = .*\n", "", recipe)
    (tmp_path / "wan_1_3b.toml").write_text(recipe + f'prompts = ["{CAPTIONS[0]}"]\n')
    page = (ROOT / "docs" / "text-to-video.md").read_text()
    commands = "".join(re.findall(r"```sh\n(.*?)```", page, re.DOTALL)).splitlines()
    assert len(commands) == 5
    for command in commands:
        for words, other in SMALLER.items():
            command = command.replace(words, other)
        here = command.replace("./run_train.sh", "python -m titan_dit.train")
        words = shlex.split(re.sub("^python", sys.executable, here))
        words += FLAGS.split() if "train" in here else []
        done = run(words, tmp_path, timeout=600)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        assert "warning" not in done.stderr, done.stderr
    pipeline = opened(tmp_path / "exported")
    noise = torch.randn(1, 4, 2, 8, 8, generator=torch.Generator().manual_seed(0))
    frames = pipeline(
        prompt=CAPTIONS[1],
        height=32,
        width=32,
        num_frames=5,
        num_inference_steps=10,
        guidance_scale=4.0,
        latents=noise,
        output_type="np",
    ).frames
    assert frames.shape == (1, 5, 32, 32, 3)
    before = opened(tmp_path / WAN)
    assert before.transformer.state_dict().keys() == pipeline.transformer.state_dict().keys()
