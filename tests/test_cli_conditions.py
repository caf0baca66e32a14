"""From the command line: pairs of pictures with masks, and a network that is given references."""

import re
import sys

import numpy as np
import pytest
import torch
from captioned_config import write_config
from commands import ROOT, metrics, only_error, run, train_command
from PIL import Image
from safetensors.torch import load_file
from tiny_text import CAPTIONS, save_encoder
from tiny_vae import save_vae

import titan_dit
from titan_dit.commands.flags import SampleFlags
from titan_dit.commands.sample import draw
from titan_dit.config.section import UserError

SECTIONS = {
    "data": {"path": "pairs"},
    # 4 wide pictures, or 6 square ones.
    "training": {"tokens_per_step": 96, "batch_multiple": 2, "tokens_per_microbatch": 48},
    "optimizer": {"lr": 0.03},
    "validation": {"samples": 4},
}


def save_pictures(folder, with_companions):
    folder.mkdir()
    for number in range(20):
        size = (8, 12 if number % 4 else 8, 3)
        for kind, seed in (("", number), (".reference", 100 + number), (".mask", 200 + number)):
            if not kind or (with_companions and (kind != ".mask" or number % 3 == 0)):
                pixels = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}{kind}.png")
        (folder / f"{number}.txt").write_text(CAPTIONS[number % len(CAPTIONS)])


SMALLER = {
    "--pixels 1048576": "--buckets 12x8,8x8",
    "VAE": "vae",
    "--text-encoder T5": "--text-encoder t5 --text-tokens 10 --device cpu",
}


def typed(command, name):
    """A command of docs/conditions.md after `titan_dit`, for smaller pictures."""
    page = (ROOT / "docs" / "conditions.md").read_text()
    (words,) = re.findall(rf"python -m titan_dit ({command} --input pairs .*)", page)
    for part, smaller in SMALLER.items():
        assert part in words
        words = words.replace(part, smaller)
    return words.replace("--input pairs --out pairs_latents", f"--input in_{name} --out {name}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Pairs with masks, the same pictures alone, both encoded, and a run on the latter."""
    folder = tmp_path_factory.mktemp("edits")
    save_vae(folder / "vae")
    save_encoder(folder / "t5")
    write_config(folder, "edits", **SECTIONS)
    for name in ("pairs", "alone"):
        save_pictures(folder / f"in_{name}", name == "pairs")
        words = typed("data encode", name).split()
        done = run([sys.executable, "-m", "titan_dit", *words], folder)
        assert done.returncode == 0, done.stderr
    trained(folder, "--job.dir", "base", "--data.path", "alone", "--training.steps", 2)
    return folder


def trained(folder, *flags, ranks=1):
    done = run(train_command(*flags, config="edits.toml", ranks=ranks), folder)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


GIVEN = ("--model.condition_channels", 2, "--model.reference_tokens", "true")
GIVEN += ("--objective.reference_dropout", 0.2, "--checkpoint.init", "base")


def test_a_run_on_pairs_starts_from_weights_without_channels_and_resumes_in_a_pipeline(folder):
    previews = ("--sampling.every", 4, "--sampling.steps", 2, "--sampling.num", 8)
    said = trained(folder, "--job.dir", "whole", *GIVEN, *previews)
    assert "a new run starts there" in said
    assert "drew whole/samples/step-00000004.png" in said
    trained(folder, "--job.dir", "parts", "--training.steps", 2, *GIVEN)
    trained(folder, "--job.dir", "parts", "--parallel.pp", 2, *GIVEN, ranks=2)
    whole, parts = ([r["loss"] for r in metrics(folder / name)] for name in ("whole", "parts"))
    assert len(whole) == 4
    assert parts == pytest.approx(whole, rel=1e-5)
    network = titan_dit.load(folder / "whole", device="cpu", weights="model").network
    assert network.embed.condition.weight.abs().max() > 0


def here(folder, monkeypatch, out="here.safetensors", **flags):
    """Draw in this process; the samples."""
    monkeypatch.chdir(folder)
    common = {"run": "whole", "steps": 3, "weights": "model", "out": out, "prompt": ("one",)}
    draw(SampleFlags(**(common | flags)), torch.device("cpu"))
    return load_file(out)["samples"]


def test_samples_depend_on_their_reference_which_is_cropped_to_their_size(folder, monkeypatch):
    given = {"cfg_scale": 2.0, "num": 2}
    first, other = (
        here(folder, monkeypatch, reference=f"in_pairs/{number}.reference.png", **given)
        for number in (1, 2)
    )
    assert first.shape == (2, 2, 4, 6)
    assert (first - other).abs().amax((1, 2, 3)).min() > 1e-3
    again = here(folder, monkeypatch, reference="in_pairs/1.reference.png", **given)
    assert torch.equal(first, again)


def test_references_that_are_missing_or_of_no_use_are_refused(folder, monkeypatch):
    with pytest.raises(UserError, match=r"given reference pictures .* `sample --reference FILE`"):
        here(folder, monkeypatch)
    with pytest.raises(UserError, match=r"--reference edits.toml: not a readable image"):
        here(folder, monkeypatch, reference="edits.toml")
    with pytest.raises(UserError, match=r"the network is given no references. Leave it out"):
        here(folder, monkeypatch, run="base", reference="in_pairs/1.reference.png")
    said = only_error(run(train_command("--job.dir", "bad", config="edits.toml"), folder))
    assert "[data] holds reference pictures of 2 channels, but [model]" in said
