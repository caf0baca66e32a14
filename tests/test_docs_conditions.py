"""Runs the commands of docs/conditions.md as written, with small pictures and networks."""

import json
import re
import shlex
import sys

import pytest
from commands import ROOT, run
from safetensors.torch import load_file
from test_cli_conditions import save_pictures
from tiny_text import save_encoder
from tiny_vae import save_vae

SMALLER = {
    'size = "XL/2"': "hidden_size = 32\nnum_layers = 2\nnum_heads = 4\npatch_size = 1",
    "[128, 128]": "[4, 6]",
    "in_channels = 16": "in_channels = 2",
    "text_tokens = 512": "text_tokens = 12",
    "text_dim = 4096": "text_dim = 32",
    "steps = 20000": "steps = 4",
    "tokens_per_step = 262144": "tokens_per_step = 192",
    "lr = 1e-4": "lr = 0.03",
    "every = 1000": "every = 0",
}
"""Parts of the page's config and what the test trains."""
IN_COMMANDS = {
    "./run_train.sh": "python -m titan_dit.train",
    "--pixels 1048576": "--buckets 12x8,8x8",
    "--vae VAE": "--vae vae",
    "--text-encoder T5": "--text-encoder t5 --text-tokens 10 --device cpu",
    "--model.condition_channels 16": "--model.condition_channels 2",
}


def blocks(kind):
    page = (ROOT / "docs" / "conditions.md").read_text()
    return re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL)


def typed(command, folder):
    """Run a command of the page."""
    for part, smaller in IN_COMMANDS.items():
        command = command.replace(part, smaller)
    done = run(shlex.split(re.sub("^python", sys.executable, command)), folder)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


def drawn(command, folder, **changed):
    """The samples that the page's `sample` draws with other values of some flags."""
    flags = {"out": "edited.safetensors", "steps": 3, "weights": "model", **changed}
    typed(" ".join([command, *(f"--{key} {value}" for key, value in flags.items())]), folder)
    return load_file(folder / "edited.safetensors")["samples"]


@pytest.mark.long
def test_the_page_works_as_written_and_pictures_depend_on_their_reference(tmp_path):
    save_vae(tmp_path / "vae")
    save_encoder(tmp_path / "t5")
    save_pictures(tmp_path / "pairs", with_companions=True)
    (config,) = blocks("toml")
    for part, smaller in SMALLER.items():
        assert config.count(part) == 1, part
        config = config.replace(part, smaller)
    (tmp_path / "edits.toml").write_text(config)
    encode, tokens, channels, sample = "".join(blocks("bash")).splitlines()
    for command in (encode, tokens, channels):
        typed(command, tmp_path)
    manifest = json.loads((tmp_path / "pairs_latents" / "manifest.json").read_text())
    assert manifest["reference"] == {"kind": "picture", "channels": 2}
    assert 0 < manifest["mask"]["mean"] < 255
    assert "--run outputs/edits " in sample
    assert "--reference photo.jpg --out edited" in sample
    for number, name in ((1, "photo.jpg"), (2, "other.jpg")):
        (tmp_path / name).write_bytes((tmp_path / f"pairs/{number}.reference.png").read_bytes())
    typed(sample, tmp_path)
    assert len([*(tmp_path / "edited").glob("*.png")]) == 1
    sample = re.sub(r" --(run|reference|out) \S+", "", sample)
    for run_of in ("outputs/edits", "outputs/edits_channels"):
        first, other, again = (
            drawn(sample, tmp_path, run=run_of, reference=reference)
            for reference in ("photo.jpg", "other.jpg", "photo.jpg")
        )
        assert (first - other).abs().max() > 1e-3, run_of
        assert first.equal(again)
