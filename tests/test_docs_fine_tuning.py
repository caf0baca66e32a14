"""Runs docs/fine-tuning.md from end to end, with fewer steps and an S/8 as the released DiT."""

import re
import shlex
import sys

import pytest
import torch
from commands import ROOT, run
from test_docs import CONFIG

from titan_dit.checkpoint import checkpoint
from titan_dit.data.latents import write_shards
from titan_dit.interop.original_dit import Original, positions
from titan_dit.pictures.library import diffusers
from titan_dit.trained_model import load

FLAGS = {
    "--config digits.toml --job.name": "--training.steps 3 --checkpoint.every 3 --sampling.every 0",
    "digits.toml\n": "--training.steps 4 --checkpoint.every 4 --sampling.every 0",
    "titan_dit sample": "--steps 2",
    "dit_xl2_256": (
        "--model.size S/8 --compile.enabled false --training.steps 2 --checkpoint.every 1 "
        "--training.global_batch_size 4 --training.microbatch_size 4 --sampling.every 0"
    ),
}


def make_inputs(folder):
    """The released weights and latents of five classes, both tiny."""
    torch.manual_seed(0)
    state = {name: torch.randn(s) * 0.02 for name, s in Original(CONFIG, 8).shapes().items()}
    state["pos_embed"] = positions(CONFIG)
    torch.save(state, folder / "DiT-XL-2-256x256.pt")
    latents, labels = torch.randn(20, 4, 32, 32), torch.arange(20) % 5
    write_shards(folder / "data/flowers", latents, labels, num_classes=5, source="a test")
    write_shards(folder / "data/imagenet_part", latents, labels, num_classes=1000, source="a test")
    network = diffusers("the test").DiTTransformer2DModel(
        num_attention_heads=6, attention_head_dim=64, num_layers=12, patch_size=8, out_channels=8
    )
    first, *others = network.transformer_blocks
    for block in others:  # As in the released weights.
        block.norm1.emb.load_state_dict(first.norm1.emb.state_dict())
    network.save_pretrained(folder / "DiT-XL-2-256")


def weights(path, *names):
    sizes = checkpoint.contents(path)
    tensors = {name: torch.empty(sizes[f"model.{name}"][0]) for name in names}
    checkpoint.load(path, {"model": tensors})
    return tensors


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_page_works_as_written(tmp_path):
    make_inputs(tmp_path)
    page = (ROOT / "docs" / "fine-tuning.md").read_text()
    blocks = re.findall(r"```(bash|python)\n(.*?)```", page, re.DOTALL)
    assert [kind for kind, _ in blocks] == ["bash", "python", *["bash"] * 5]
    output = ""
    for kind, block in blocks:
        commands = [block] if kind == "python" else block.splitlines(keepends=True)
        for command in commands:
            output += one(kind, command, tmp_path)
    assert "reinitialized: embed.label.table.weight" in output
    assert "lora    rank 8, scale 1: 16 layers" in output
    assert "base nf4: 16 weights, of which encoding changed" in output
    assert "base nf4: 16 weights, decoded once; they differ from those of" in output
    assert [line.split()[-1] for line in output.splitlines() if "RTX 4090, 24 GB" in line] == [
        "yes",
        "no",
    ]
    assert [line.split()[-1] for line in output.splitlines() if "L40S, 48 GB" in line][-1] == "yes"
    assert all((tmp_path / f"{name}.png").is_file() for name in ("turned", "adapted"))
    whole, adapted = load(tmp_path / "outputs/tuned"), load(tmp_path / "weights/with_adapter")
    expected = dict(whole.network.named_parameters())
    for name, tensor in adapted.network.named_parameters():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-7)
    tuned = tmp_path / "outputs/flowers/checkpoints/step-00000002"
    names = [n.removeprefix("model.") for n in checkpoint.contents(tuned)]
    [name, *_] = [n for n in names if n.startswith("embed.timestep.")]
    before = weights(tmp_path / "weights/dit_xl2", name)[name]
    after = weights(tuned, name, "embed.label.table.weight")
    assert torch.equal(after[name], before)
    assert after["embed.label.table.weight"].shape[0] == 6


def one(kind, command, folder):
    """Run a command, or a block of Python; return what it printed."""
    if kind == "python":
        words = [sys.executable, "-c", command]
    else:
        here = command.replace("NGPU=8 ", "").replace("./run_train.sh", "python -m titan_dit.train")
        flags = next((flags for part, flags in FLAGS.items() if part in command), "")
        words = [*shlex.split(re.sub("^python", sys.executable, here)), *flags.split()]
    done = run(words, folder)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr
