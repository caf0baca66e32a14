"""From the command line: captioned pictures, their embeddings, and a text-to-image DiT on them."""

import json
import sys

import numpy as np
import pytest
import torch
from captioned_config import write_config
from commands import metrics, only_error, run, train_command
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_text import CAPTIONS, save_encoder
from tiny_vae import save_vae

import titan_dit
from titan_dit.checkpoint import checkpoint
from titan_dit.commands import predict, sample_inputs
from titan_dit.commands.flags import PredictFlags, SampleFlags
from titan_dit.commands.sample import draw
from titan_dit.config.section import UserError
from titan_dit.diffusion.drawing import generate
from titan_dit.diffusion.samplers.ode import heun

SECTIONS = {
    "objective": {"shift_by_tokens": "sqrt"},
    "data": {"path": "latents"},
    # 8 wide pictures, or 12 square ones.
    "training": {"tokens_per_step": 192, "batch_multiple": 4, "tokens_per_microbatch": 48},
    "validation": {"samples": 8},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Forty pictures in two shapes with a caption beside each, encoded, and a config."""
    folder = tmp_path_factory.mktemp("captioned")
    (folder / "pictures").mkdir()
    for number in range(40):
        size = (8, 12 if number % 4 else 8, 3)
        pixels = np.random.default_rng(number).integers(0, 256, size, dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "pictures" / f"{number}.png")
        caption = CAPTIONS[number % len(CAPTIONS)]
        (folder / "pictures" / f"{number}.txt").write_text(caption)
    save_vae(folder / "vae")
    save_encoder(folder / "t5")
    save_encoder(folder / "other", seed=1)
    write_config(folder, "captioned", **SECTIONS)
    words = ["--input", "pictures", "--out", "latents", "--vae", "vae", "--buckets", "12x8,8x8"]
    words += ["--text-encoder", "t5", "--text-tokens", "10", "--device", "cpu"]
    done = run([sys.executable, "-m", "titan_dit", "data", "encode", *words], folder)
    assert done.returncode == 0, done.stderr
    return folder


def trained(folder, *flags, ranks=1):
    done = run(train_command(*flags, config="captioned.toml", ranks=ranks), folder)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


PREVIEWS = ("--sampling.every", 2, "--sampling.steps", 2, "--sampling.num", 4)
PROMPTS = ("a red seven", "one", "a green two")


def test_a_run_on_captions_resumes_on_a_pipeline_with_the_same_losses_and_previews(folder):
    prompts = ("--sampling.prompts", *PROMPTS[:2], "--sampling.vae", "vae")
    trained(folder, "--job.dir", "whole", *PREVIEWS, *prompts)
    trained(folder, "--job.dir", "parts", "--training.steps", 2, *PREVIEWS, *prompts)
    (folder / "t5").rename(folder / "gone")  # Its embeddings of the prompts are in the run.
    trained(folder, "--job.dir", "parts", "--parallel.pp", 2, *PREVIEWS, *prompts, ranks=2)
    (folder / "gone").rename(folder / "t5")
    whole, parts = ([r["loss"] for r in metrics(folder / name)] for name in ("whole", "parts"))
    assert len(whole) == 4
    validated = metrics(folder / "parts")[-1]
    assert {"validation_loss_4x4x6", "validation_loss_4x4x4"} <= validated.keys()
    assert parts == pytest.approx(whole, rel=1e-5)
    drawn = [picture(folder / name / "samples/step-00000004.png") for name in ("whole", "parts")]
    assert np.abs(drawn[0] - drawn[1]).max() <= 2
    assert (drawn[0][:50, :30] < 128).any(), "a caption on the left"


def picture(file):
    with Image.open(file) as opened:
        return np.asarray(opened).astype(int)


def command(folder, *words, **variables):
    return run([sys.executable, "-m", "titan_dit", *map(str, words)], folder, **variables)


@pytest.fixture(scope="module")
def drawn(folder):
    """A run that shows the captions of its data, and has weights that depend on them."""
    said = trained(folder, "--job.dir", "drawn", *PREVIEWS, "--optimizer.lr", 0.03)
    assert "drew drawn/samples/step-00000004.png" in said
    (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    return folder


def here(folder, monkeypatch, **flags):
    """Draw in this process, which is faster than a command."""
    monkeypatch.chdir(folder)
    common = {"run": "drawn", "steps": 3, "weights": "model", "out": "here.safetensors"}
    draw(SampleFlags(**(common | flags)), torch.device("cpu"))


def read(file):
    """The tensors and the prompts of a file of samples."""
    with safe_open(file, framework="pt") as opened:
        found = {name: opened.get_tensor(name) for name in ("samples", "prompt")}
        return found | {"prompts": json.loads(opened.metadata()["prompts"])}


def test_samples_are_in_the_order_of_their_prompts_on_any_number_of_ranks(drawn, monkeypatch):
    here(drawn, monkeypatch, prompts="prompts.txt", num=2)
    lines = read("here.safetensors")
    assert lines["prompts"] == list(PROMPTS)
    assert lines["prompt"].tolist() == [0, 0, 1, 1, 2, 2]
    assert lines["samples"].shape == (6, 2, 4, 6)
    words = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    flags = ("--run", "drawn", "--device", "cpu", "--steps", 3, "--weights", "model", "--num", 2)
    flags += ("--batch-size", 2, "--out", "two.safetensors")
    done = command(drawn, "sample", *flags, *words, NGPU=2)
    assert done.returncode == 0, done.stderr
    two = read("two.safetensors")
    assert two["prompts"] == lines["prompts"]
    torch.testing.assert_close(two["samples"], lines["samples"], rtol=1e-5, atol=1e-5)
    # As if there were too many prompts to keep: each batch's are embedded when it is drawn.
    monkeypatch.setattr(sample_inputs, "KEPT", 0)
    here(drawn, monkeypatch, prompts="prompts.txt", num=2, batch_size=4)
    later = read("here.safetensors")["samples"]
    torch.testing.assert_close(later, lines["samples"], rtol=1e-5, atol=1e-5)
    # A sample depends on its number and its prompt, not on the prompts before it.
    here(drawn, monkeypatch, prompt=(PROMPTS[2],) * 6)
    same = read("here.safetensors")["samples"]
    torch.testing.assert_close(same[4:], lines["samples"][4:], rtol=1e-5, atol=1e-5)
    assert (same[:4] - lines["samples"][:4]).abs().amax((1, 2, 3)).min() > 1e-4


def test_a_run_in_python_draws_and_predicts_as_the_commands_do(drawn, monkeypatch):
    here(drawn, monkeypatch, prompts="prompts.txt", cfg_scale=1.0)
    run = titan_dit.load("drawn", device="cpu", weights="model")
    given = run.embed(PROMPTS)
    x, t, y = torch.zeros(1, 2, 4, 6), torch.ones(1), {k: v[:1] for k, v in given.items()}
    numbers = torch.arange(3)
    with torch.no_grad():
        tokens = generate(run.network, run.objective, given, numbers, seed=0, sampler=heun, steps=3)
        prediction = run.model(x, t, y)
    stored = run.objective.data.to_stored_units(run.model_config.detokenize(tokens))
    drawn_here = read("here.safetensors")["samples"]
    torch.testing.assert_close(stored, drawn_here, rtol=1e-5, atol=1e-5)
    save_file({"x": x, "t": t, **y}, "in.safetensors")
    flags = {"run": "drawn", "input": "in.safetensors", "weights": "model", "device": "cpu"}
    predict.main(PredictFlags(out="out.safetensors", **flags))
    torch.testing.assert_close(load_file("out.safetensors")["out"], prediction)


def test_a_negative_prompt_guides_and_a_size_is_in_pixels(drawn, monkeypatch):
    found = []
    for flags in ({}, {"negative": "a green two on yellow"}, {"negative": ""}, {"size": "16x20"}):
        here(drawn, monkeypatch, prompt=("one",), **flags)
        found.append(read("here.safetensors")["samples"])
    plain, away, empty, larger = found
    assert (plain - away).abs().max() > 1e-4
    torch.testing.assert_close(empty, plain, rtol=1e-4, atol=1e-4)
    assert larger.shape == (1, 2, 10, 8)


def test_pictures_are_named_by_their_prompts(drawn, monkeypatch):
    here(drawn, monkeypatch, out="named", prompts="prompts.txt", num=2)
    names = sorted(path.name for path in (drawn / "named").glob("*.png"))
    assert names[:3] == ["000000-a-red-seven.png", "000001-a-red-seven.png", "000002-one.png"]
    lines = (drawn / "named" / "metadata.jsonl").read_text().splitlines()
    assert json.loads(lines[5]) == {"file_name": "000005-a-green-two.png", "text": "a green two"}
    here(drawn, monkeypatch, out="named.png", prompts="prompts.txt")
    assert picture(drawn / "named.png").shape[0] == 3 * 50


def test_a_run_on_captions_is_validated_and_replayed(drawn):
    done = command(drawn, "evaluate", "--run", "drawn", "--device", "cpu", "--weights", "model")
    assert done.returncode == 0, done.stderr
    last = metrics(drawn / "drawn")[-1]
    assert f"{last['validation_loss']:.5g}"[:6] in done.stdout
    done = command(drawn, "replay", "--run", "drawn", "--step", 3, "--device", "cpu")
    assert "0 of 8 samples are at fault" in done.stdout


BAD = {
    "no prompt": ({}, "the run was trained on captions: give --prompt TEXT"),
    "labels": ({"labels": "3"}, "--labels 3: the run was trained on captions, not on classes."),
    "blank": ({"prompts": "blank.txt"}, "--prompts blank.txt, line 2: is blank. Delete it"),
    "no file": ({"prompts": "none.txt"}, "--prompts none.txt cannot be read: No such file"),
    "encoder": ({"prompt": ("a",), "text_encoder": "other"}, "/other is T5EncoderModel"),
    "odd": ({"prompt": ("a",), "size": "16x9"}, "--size 16x9: the sides must be multiples of 2"),
    "size": ({"prompt": ("a",), "size": "big"}, "--size big: give width x height in pixels"),
    "noise": ({"prompt": ("a",), "noise": "n.safetensors"}, "and the prompts are [1]; the network"),
    "unused": (
        {"prompt": ("a",), "negative": "b", "cfg_scale": 1.0},
        "--negative has no effect with --cfg-scale 1. Leave one of them out.",
    ),
    "length": ({"prompt": ("a",), "length": 3}, "--length is not a flag for pictures"),
}


@pytest.mark.parametrize("case", BAD)
def test_flags_that_do_not_fit_captions_are_one_line(case, drawn, monkeypatch):
    flags, words = BAD[case]
    (drawn / "blank.txt").write_text("a red seven\n \none\n")
    save_file({"noise": torch.zeros(2, 2, 4, 6)}, drawn / "n.safetensors")
    with pytest.raises(UserError) as error:
        here(drawn, monkeypatch, out="bad.safetensors", **flags)
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    assert not (drawn / "bad.safetensors").exists()


def test_previews_by_another_encoder_are_refused_before_the_first_step(folder):
    flags = ("--sampling.prompts", "a", "--sampling.text_encoder", "other", "--job.dir", "refused")
    said = only_error(run(train_command(*PREVIEWS, *flags, config="captioned.toml"), folder))
    assert said.startswith("error: [sampling] text_encoder ")
    assert "other is T5EncoderModel" in said
    assert not (folder / "refused").exists()


KILLED = """
import os
import signal
from pathlib import Path

from titan_dit.hooks import Hook
from titan_dit.pictures.text_encoder import TextEncoder

class WhileItEncodes(Hook):
    def step_ended(self, run):
        if (run.step, run.rank) == (2, 1):
            encode = TextEncoder.encode_padded

            def last(self, ids, lengths):
                encode(self, ids, lengths)
                Path("encoded").write_text(f"{len(ids)}")
                os.kill(os.getpid(), signal.SIGKILL)

            TextEncoder.encode_padded = last
"""
"""A hook that ends rank 1 in the third step: it has embedded its share, the others wait for it."""


def test_text_online_gives_the_losses_of_stored_embeddings_and_resumes(folder):
    for dtype in ("none", "float32"):
        words = ["--input", "pictures", "--out", f"of_{dtype}", "--vae", "vae"]
        words += ["--buckets", "12x8,8x8", "--text-encoder", "t5", "--device", "cpu"]
        done = command(folder, "data", "encode", *words, "--text-dtype", dtype)
        assert done.returncode == 0, done.stderr
    # A rate at which the second step's loss depends on the captions.
    learnt = (*PREVIEWS, "--optimizer.lr", 0.03)
    online = ("--text.mode", "online", "--text.dtype", "fp32", "--data.path", "of_none", *learnt)
    trained(folder, "--job.dir", "stored", "--data.path", "of_float32", *learnt)
    said = trained(folder, "--job.dir", "online", *online)
    assert "text    T5EncoderModel" in said
    rows = [metrics(folder / name) for name in ("stored", "online")]
    for key in ("loss", "grad_norm"):
        stored, found = ([row[key] for row in each] for each in rows)
        assert found[:2] == pytest.approx(stored[:2], rel=1e-6), key
        assert found == pytest.approx(stored, rel=1e-5), key
    assert rows[1][-1]["validation_loss"] == pytest.approx(rows[0][-1]["validation_loss"], rel=1e-5)
    assert all(row["text_ms"] > 0 for row in rows[1])
    assert "text_ms" not in rows[0][0]
    # Kept and saved are the network's tensors alone, as without the encoder.
    sizes = [
        {name: size for name, (size, _) in contents(folder / run / "checkpoints").items()}
        for run in ("stored", "online")
    ]
    assert sizes[0] == sizes[1]
    # Two ranks share the captions until one is killed while it encodes; a pipeline goes on.
    (folder / "ends.py").write_text(KILLED)
    sliced = ("--parallel.cp", 2, "--checkpoint.async_save", "false")
    flags = ("--job.dir", "again", *online, *sliced, "--job.hooks", "ends:WhileItEncodes")
    done = run(train_command(*flags, config="captioned.toml", ranks=2), folder)
    assert done.returncode != 0
    assert "SIGKILL" in done.stdout + done.stderr
    assert (folder / "encoded").read_text() == "4"
    said = trained(folder, "--job.dir", "again", "--parallel.pp", 2, *online, ranks=2)
    assert "resumed from again/checkpoints/step-00000002" in said
    for key in ("step", "loss", "grad_norm"):
        values = [[row[key] for row in metrics(folder / name)] for name in ("online", "again")]
        assert values[1] == pytest.approx(values[0], rel=1e-4), key
    drawn = [picture(folder / run / "samples/step-00000004.png") for run in ("stored", "online")]
    assert np.abs(drawn[0] - drawn[1]).max() <= 2
    done = command(folder, "replay", "--run", "online", "--step", 3, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    refused = run(train_command("--data.path", "of_none", config="captioned.toml"), folder)
    assert "token ids alone" in only_error(refused)


def contents(checkpoints):
    newest = max(checkpoints.glob("step-*"))
    return checkpoint.contents(newest)
