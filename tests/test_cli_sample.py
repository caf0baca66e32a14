"""`python -m titan_dit sample`: output and errors."""

import sys
from pathlib import Path

import commands
import pytest
import torch
from commands import sample, train
from PIL import Image
from safetensors.torch import load_file, save_file

import titan_dit
from titan_dit.config.section import UserError
from titan_dit.trainer import Trainer

RUN = "outputs/digits"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of two ranks with two checkpoints."""
    cwd = tmp_path_factory.mktemp("trained")
    flags = ("--training.steps", 40, "--checkpoint.every", 20, "--sampling.every", 0)
    flags += ("--metrics.tensorboard", "false", "--training.global_batch_size", 32)
    flags += ("--ema.decays", 0.9, 0.5)
    done = train(*flags, cwd=cwd, ranks=2)
    assert done.returncode == 0, done.stderr
    return cwd


def draw(cwd, *flags):
    """The tensors that a command writes."""
    done = sample("--run", RUN, "--out", "out/samples.safetensors", "--steps", 3, *flags, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return load_file(cwd / "out" / "samples.safetensors")


def test_samples_are_written_with_their_labels(trained):
    drawn = draw(trained, "--num", 50, "--labels", "all")
    assert drawn["samples"].shape == (50, 1, 8, 8)
    assert drawn["samples"].dtype == torch.float32
    assert drawn["samples"].isfinite().all()
    assert drawn["labels"].dtype == torch.int64
    assert drawn["labels"].bincount().tolist() == [5] * 10


def test_a_sample_depends_on_seed_and_number_alone(trained):
    whole = draw(trained, "--num", 12, "--labels", "3")
    parts = draw(trained, "--num", 12, "--labels", "3", "--batch-size", 5)
    torch.testing.assert_close(parts["samples"], whole["samples"], rtol=1e-5, atol=1e-5)
    other = draw(trained, "--num", 12, "--labels", "3", "--seed", 1)
    assert (other["samples"] - whole["samples"]).abs().max() > 0.1


def test_the_weights_are_those_asked_for(trained):
    flags = ("--num", 10, "--cfg-scale", 1)
    choices = {
        "newest": (),
        "older": ("--step", 20),
        "last weights": ("--weights", "model"),
        "second average": ("--decay", 0.5),
    }
    drawn = {name: draw(trained, *flags, *choice)["samples"] for name, choice in choices.items()}
    names = list(drawn)
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            assert not torch.equal(drawn[first], drawn[second]), (first, second)
    path = f"{RUN}/checkpoints/step-00000040"
    done = sample("--run", path, "--out", "a.safetensors", "--steps", 3, *flags, cwd=trained)
    assert done.returncode == 0, done.stderr
    assert torch.equal(load_file(trained / "a.safetensors")["samples"], drawn["newest"])


def test_a_picture_is_drawn(trained):
    done = sample("--run", RUN, "--out", "grid.png", "--num", 20, "--steps", 2, cwd=trained)
    assert done.returncode == 0, done.stderr
    with Image.open(trained / "grid.png") as picture:
        assert picture.height > 10 * 40
        assert len(picture.getcolors(1 << 20)) > 20


def test_a_run_loaded_in_python_predicts_as_the_command_does(trained, monkeypatch, capsys):
    inputs = {"x": torch.randn(3, 1, 8, 8), "t": torch.tensor([0.0, 500.0, 999.0])}
    inputs["y"] = torch.tensor([3, -1, 9])
    save_file(inputs, trained / "in.safetensors")
    flags = ("--run", RUN, "--input", "in.safetensors", "--out", "out.safetensors")
    done = commands.run([sys.executable, "-m", "titan_dit", "predict", *flags], trained)
    assert done.returncode == 0, done.stderr
    run = titan_dit.load(trained / RUN, device="cpu")
    assert (run.step, run.weights, run.model.training) == (40, "ema 0.9", False)
    with torch.no_grad():
        out = run.model(**inputs)
        assert torch.equal(out, load_file(trained / "out.safetensors")["out"])
        choices = {"weights": "model"}, {"decay": 0.5}, {"step": 20}
        for choice in choices:
            other = Trainer.load(str(trained / RUN), device="cpu", **choice).model(**inputs)
            assert (other - out).abs().max() > 1e-4, choice
    monkeypatch.chdir(trained)
    page = (commands.ROOT / "docs" / "python-api.md").read_text()
    exec(page.split("## A trained run in Python\n\n```python\n")[1].split("```")[0], {})
    assert "40 ema 0.9 torch.Size([4, 1, 8, 8])" in capsys.readouterr().out
    with pytest.raises(UserError, match="run nothing: no checkpoint found"):
        Trainer.load("nothing")


BAD = {
    "no run": (("--run", "nothing"), "no checkpoint found"),
    "step": (("--step", 7), "It has 20, 40"),
    "labels": (("--labels", "3,17"), "classes 0 to 9"),
    "words": (("--labels", "three"), "numbers such as 0,1,2; the run's dataset has no class names"),
    "sampler": (("--sampler", "rk4"), "euler, heun"),
    "decay": (("--decay", 0.7), "0.9, 0.5"),
    "no average": (
        ("--decay", 0.9, "--weights", "model"),
        "--decay 0.9 names an average, but --weights is model.",
    ),
    "suffix": (("--out", "x.gif"), "name a .safetensors, .png or .npz file, or a folder."),
    "folder": (("--out", "outputs"), "--out outputs exists."),
    "interval": (("--cfg-interval", 0.8), "give two noise levels from 0 (data) to 1"),
    "scheduler": (("--sampler", "diffusers:Nothing"), "diffusers has no scheduler Nothing."),
    "pixels": (("--vae", "some"), "--vae some: the run was trained on pixels, not on latents."),
    "guide": (("--guide", "nothing"), "--guide nothing: no checkpoint found"),
    "a config's key": (("--sampling.cfg_scale", 3), "the flag of `sample` is --cfg-scale."),
    "another key": (("--optimizer.lr", 3), "a key of `train`. `sample` has --run, --out, --num"),
    "a config": (("--config", "digits"), "reads no config file. The config is the run's: give --r"),
    "number": (("--num", 0), "num=0 must be at least 1"),
    "steps": (("--steps", 0), "--steps=0 must be at least 1."),
    "home": (("--noise", "~/nothing.safetensors"), f"{Path.home()}/nothing.safetensors"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_flags_are_one_clear_error(case, trained):
    flags, wanted = BAD[case]
    defaults = {"--run": RUN, "--out": "bad.safetensors"} | dict(
        zip(flags[::2], flags[1::2], strict=True)
    )
    done = sample(*[word for pair in defaults.items() for word in pair], cwd=trained)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert wanted in line
    assert not (trained / "bad.safetensors").exists()


def test_an_unknown_command_names_the_known_ones(tmp_path):
    done = commands.run([commands.sys.executable, "-m", "titan_dit", "draw"], tmp_path)
    assert done.returncode == 2
    assert "There is: train, sample" in done.stderr


def test_samples_and_inputs_that_are_not_finite_are_named_and_nothing_is_written(trained):
    """NaN as noise, samples that overflow, and the same of `predict`."""
    noise = torch.zeros(3, 1, 8, 8)
    noise[1, 0, 2, 3] = torch.nan
    save_file({"noise": noise, "labels": torch.arange(3)}, trained / "nan.safetensors")
    save_file({"x": noise, "t": torch.rand(3), "y": torch.arange(3)}, trained / "x.safetensors")
    out = ("--out", "never.safetensors")
    done = sample("--run", RUN, *out, "--noise", "nan.safetensors", cwd=trained)
    words = "error: --noise nan.safetensors: noise of samples 1 is NaN or infinite. Remove them.\n"
    assert commands.only_error(done) == words
    done = sample("--run", RUN, *out, "--num", 2, "--cfg-scale", 1e38, cwd=trained)
    assert "error: samples 0, 1 of outputs/digits/" in commands.only_error(done)
    predict = [sys.executable, "-m", "titan_dit", "predict", "--run", RUN, *out]
    done = commands.run([*predict, "--input", "x.safetensors"], trained)
    assert "--input x.safetensors: x of samples 1 is NaN" in commands.only_error(done)
    assert not list(trained.glob("never*.safetensors"))


def test_a_file_that_is_read_is_not_written(trained):
    save_file(
        {"noise": torch.zeros(1, 1, 8, 8), "labels": torch.tensor([1])}, trained / "n.safetensors"
    )
    before = (trained / "n.safetensors").read_bytes()
    (trained / "link.safetensors").symlink_to("n.safetensors")
    for name in ("n.safetensors", "link.safetensors"):
        done = sample("--run", RUN, "--noise", "n.safetensors", "--out", name, cwd=trained)
        assert f"--out {name} is --noise n.safetensors, which is read" in commands.only_error(done)
    assert (trained / "n.safetensors").read_bytes() == before
