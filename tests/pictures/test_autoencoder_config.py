"""Autoencoders of strangers: their config is checked before diffusers builds what it says."""

import json
import re

import pytest
import tiny_vae
import torch

from titan_dit.config import user_text
from titan_dit.config.section import UserError
from titan_dit.pictures import autoencoder

WRONG = {
    "a word as scale": ({"scaling_factor": "0.5"}, "scaling_factor"),
    "no finite shift": ({"shift_factor": 1e400}, "shift_factor"),
    "a std of 0": ({"latents_mean": [0.0], "latents_std": [0.0]}, "latents_std"),
    "a number as widths": ({"block_out_channels": 4}, "block_out_channels"),
    "a fraction as channels": ({"latent_channels": 0.5}, "latent_channels"),
    "more layers than any has": ({"layers_per_block": 65}, "layers_per_block=65 is above 64"),
    "more weights than its files": ({"block_out_channels": [4096, 4096]}, r"hold [\d,]+ bytes"),
    "a list as activation": ({"act_fn": ["silu"]}, "no autoencoder can be loaded"),
    "a table as groups": ({"norm_num_groups": {"a": 2}}, "no autoencoder can be loaded"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_vae.save_vae(tmp_path_factory.mktemp("vae"))


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_config_is_one_line(case, folder, tmp_path):
    changes, words = WRONG[case]
    for file in autoencoder.Path(folder).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(UserError, match=words) as caught:
        autoencoder.load(str(tmp_path), torch.device("cpu"))
    assert re.match(r"--vae \S+: [^\n]+$", str(caught.value))


def test_a_config_that_is_no_object_is_one_line(folder, tmp_path):
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(UserError, match=r"^--vae [^\n]+$"):
        autoencoder.load(str(tmp_path), torch.device("cpu"))


def test_a_large_config_is_not_read(folder, monkeypatch):
    monkeypatch.setattr(user_text, "MAX_BYTES", 10)
    with pytest.raises(UserError, match=r"config\.json is larger than 10 bytes"):
        autoencoder.load(folder, torch.device("cpu"))
