"""Types the commands of docs/released-networks.md with tiny random pipelines, on captioned emoji.

The adapters that it trains load in the pipelines, which then draw what `sample` draws.
"""

import re
import shlex
import sys

import pytest
import torch
from commands import ROOT, run
from exports import CPU
from pipelines import drawn_by, opened, save_pipeline
from safetensors.torch import load_file, save_file

from titan_dit.pictures import autoencoder

FOLDERS = {"flux2": "FLUX.2-klein-base-4B", "z_image": "Z-Image"}
SCHEDULERS = {"flux2": {"use_dynamic_shifting": True, "shift": 1.0}, "z_image": {"shift": 3.0}}
RUNS = {"flux2": "flux2_klein_lora", "z_image": "z_image_lora"}
ADAPTERS = {"flux2": "klein_adapter", "z_image": "z_image_adapter"}
SHAPES = {"flux2": (8, 8, 8), "z_image": (4, 16, 16)}
"""[c, h, w] of the latents of a picture of 32 x 32 pixels."""
SMALLER = {
    "--pixels 1048576": "--pixels 1024",
    "1024x1024": "32x32",
    "--cfg-scale": "--steps 3 --cfg-scale",
    # Prompts are rounded as stored embeddings are, to float16 by default.
    "--text-template chat ": "--text-template chat --text-dtype float32 ",
}
"""What is typed in place of words of the page: 32 x 32 pixels, a few steps, fp32."""
COMMON = (
    "--training.steps 12 --training.tokens_per_step 512 --training.tokens_per_microbatch 256 "
    "--checkpoint.every 12 --sampling.every 12 --sampling.num 2 --sampling.steps 2 "
    "--metrics.every 4 --metrics.tensorboard false --precision.dtype fp32 --optimizer.lr 3e-2 "
    "--lr_scheduler.warmup_steps 0 "
    "--model.hidden_size 48 --model.num_heads 3 --model.text_dim 24"
)
FLAGS = {
    "flux2_klein_lora.toml": (
        "--model.num_double_layers 1 --model.num_single_layers 2 --model.in_channels 8 "
        "--model.latent_size 8 --text.dtype fp32"
    ),
    "z_image_lora.toml": (
        "--model.num_layers 2 --model.num_refiner_layers 1 --model.in_channels 4 "
        "--model.latent_size 16 --model.rope_axes [8,4,4]"
    ),
}
"""Sizes of the tiny networks, and a few steps."""
PROMPTS = ("an emoji of red apple", "an emoji of police car")
NEGATIVE = "an emoji of face"


def typed(command, folder):
    """Run a command of the page; what it printed."""
    for words, other in SMALLER.items():
        command = command.replace(words, other)
    here = command.replace("./run_train.sh", "python -m titan_dit.train")
    flags = next((f"{COMMON} {more}" for part, more in FLAGS.items() if part in here), "")
    words = [*shlex.split(re.sub("^python", sys.executable, here)), *flags.split()]
    done = run(words, folder, timeout=1200)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def sampled(name, folder, noise):
    """Ten steps of `sample` from the run, decoded to 0 to 1."""
    save_file({"noise": noise}, folder / "noise.safetensors")
    prompts = " ".join(f'--prompt "{prompt}"' for prompt in PROMPTS)
    typed(
        f"python -m titan_dit sample --run outputs/{RUNS[name]} {prompts} --negative '{NEGATIVE}' "
        "--sampler euler --steps 10 --size 32x32 --noise noise.safetensors --cfg_scale 4 "
        f"--out {name}.safetensors",
        folder,
    )
    vae = autoencoder.load(str(folder / FOLDERS[name]), CPU)
    pictures = vae.decoded(load_file(folder / f"{name}.safetensors")["samples"])
    return (pictures / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1)


@pytest.mark.long
def test_the_page_works_as_written_and_pipelines_draw_what_sample_draws(tmp_path):
    pytest.importorskip("peft")
    for name in RUNS.values():  # Of the recipes all but the named size.
        recipe = (ROOT / "train_configs" / f"{name}.toml").read_text()
        (tmp_path / f"{name}.toml").write_text(re.sub(r"(?m)^size = .*\n", "", recipe))
    page = (ROOT / "docs" / "released-networks.md").read_text()
    blocks = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    assert [len(block.splitlines()) for block in blocks] == [6, 4]
    (example,) = re.findall(r"`(python -m titan_dit data example [^`]*)`", page)
    typed(example, tmp_path)
    captions = [file.read_text().strip() for file in sorted((tmp_path / "pictures").glob("*.txt"))]
    assert len(captions) > 1000
    for name, block in zip(FOLDERS, blocks, strict=True):
        words = [*captions, "an emoji of"]
        save_pipeline(tmp_path / FOLDERS[name], name, words, **SCHEDULERS[name])
        output = "".join(typed(command, tmp_path) for command in block.splitlines())
        assert "warning" not in output
        noise = torch.randn(2, *SHAPES[name], generator=torch.Generator().manual_seed(1))
        pipeline = opened(tmp_path / FOLDERS[name])
        if name == "flux2":
            embeds, _ = pipeline.encode_prompt([NEGATIVE] * 2, device=CPU)
            negative = {"negative_prompt_embeds": embeds}
        else:
            negative = {"negative_prompt": [NEGATIVE] * 2}
        before = drawn_by(pipeline, PROMPTS, noise, 4.0, **negative)
        pipeline.load_lora_weights(tmp_path / ADAPTERS[name])
        after = drawn_by(pipeline, PROMPTS, noise, 4.0, **negative)
        ours = sampled(name, tmp_path, noise)
        largest = (ours - after).abs().max().item()
        print(f"{name}: {largest:.1e} of a pixel; the adapters change up to ", end="")
        print(f"{(after - before).abs().max():.2f}")
        assert largest <= 1e-4
        assert (after - before).abs().max() > 0.01, "the adapters count"
