"""Types the commands of docs/fine-tuning.md on adapters of other tools, with a tiny Z-Image."""

import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import tiny_joint
import torch
from commands import ROOT, run
from exports import converted
from pipelines import networks
from safetensors.torch import load_file, save_file
from test_lora_networks import SINGLE_FILES, added, assert_same, by_formula, counterpart, reader

from titan_dit.config import config_file
from titan_dit.pictures.library import diffusers
from titan_dit.trained_model import load

LAYERS = ("layers.0.attention.qkv", "layers.1.attention.out", "noise_refiner.0.feed_forward.w2")
RANK, ALPHA = 2, 3.0
SIZES = {"hidden_size": 48, "num_layers": 2, "num_refiner_layers": 1, "num_heads": 3}
SIZES |= {"rope_axes": [8, 4, 4], "in_channels": 4, "text_dim": 24}


def write_adapters(folder, base):
    """A file of kohya's tools, and a DoRA of the same layers."""
    found, tensors, norms = counterpart(base), {}, {}
    torch.manual_seed(0)
    for layer in LAYERS:
        shapes = [found.outline()[f"{own}.weight"].shape for own in found.originals()[layer].layers]
        name = f"lora_unet_{layer.replace('.', '_')}"
        outputs = sum(rows for rows, _ in shapes)
        tensors[f"{name}.lora_down.weight"] = torch.randn(RANK, shapes[0][1])
        tensors[f"{name}.lora_up.weight"] = torch.randn(outputs, RANK) / 10
        tensors[f"{name}.alpha"] = torch.tensor(ALPHA)
        norms[f"{name}.dora_scale"] = torch.ones(outputs, 1)
    save_file(tensors, folder / "style.safetensors")
    save_file(tensors | norms, folder / "dora.safetensors")


def write_config(folder, targets):
    """A config that trains the adapters on random captioned pictures."""
    shutil.copyfile(Path(tiny_joint.__file__), folder / "tiny_joint.py")
    config = tiny_joint.joint_config(
        "z_image",
        job={"name": "style"},
        model=SIZES,
        data={"channels": 4, "text_dim": 24},
        lora={"rank": RANK, "alpha": ALPHA, "targets": targets, "dropout": 0.1},
        checkpoint={"every": 4, "allow_changes": True},
        sampling={"every": 0},
        ema={"decays": []},
    )
    (folder / "style.toml").write_text(config_file.to_toml(config_file.to_tables(config)))


def typed(command, folder):
    here = command.replace("./run_train.sh", "python -m titan_dit.train")
    done = run(shlex.split(re.sub("^python", sys.executable, here)), folder)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


@pytest.mark.long
def test_adapters_are_read_trained_on_and_written_as_the_page_says(tmp_path):
    networks(diffusers("the test"), "z_image")[0].save_pretrained(tmp_path / "theirs")
    base = converted(tmp_path / "theirs", tmp_path / "weights" / "z_image")
    write_adapters(tmp_path, base)
    page = (ROOT / "docs" / "fine-tuning.md").read_text()
    section = page.partition("## Adapters from other tools")[2].partition("\n## ")[0]
    (block,) = re.findall(r"```\n(python .*?)```", section, re.DOTALL)
    read, train, kohya, comfyui, merge = block.splitlines()
    output = typed(read, tmp_path)
    assert "adapters of rank 2, alpha 3.0, of 3 layers (targets = [" in output
    names = re.search(r"targets = (\[.*?\])", output)[1]
    write_config(tmp_path, [word.strip('" ') for word in names.strip("[]").split(",")])
    typed(train, tmp_path)
    typed(kohya, tmp_path)
    typed(comfyui, tmp_path)
    # What the run adds to its base is in both files.
    rename = reader("single_file_utils", SINGLE_FILES["z_image"])
    expected = added(tmp_path / "outputs" / "style", base)
    for form in ("kohya", "comfyui"):
        file = tmp_path / f"style_{form}.safetensors"
        assert_same(by_formula(file, form, LAYERS, rename), expected, within=1e-5)
    given = by_formula(tmp_path / "style.safetensors", "kohya", LAYERS, rename)
    trained = [name for name in given if not torch.allclose(given[name], expected[name])]
    assert trained == list(given)
    assert "adapters of 3 layers added to the weights" in typed(merge, tmp_path)
    merged = dict(load(tmp_path / "weights" / "merged").network.named_parameters())
    rows = merged["blocks.3.attn.out.weight"].norm(dim=1)
    torch.testing.assert_close(rows, torch.ones_like(rows))
    assert "lora_unet_layers_1_attention_out.dora_scale" in load_file(tmp_path / "dora.safetensors")
