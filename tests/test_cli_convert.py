"""Weights of the original DiT: import, predict, train, sample, export, by command line."""

import json
import os
import pickle
import shutil
import sys
from pathlib import Path

import commands
import pytest
import torch
from commands import metrics, sample, train
from safetensors.torch import load_file, save_file

from titan_dit.checkpoint import checkpoint, record
from titan_dit.checkpoint.record import read_record
from titan_dit.checkpoint.run_checkpoints import find_checkpoint
from titan_dit.commands import convert, predict
from titan_dit.commands import sample as sampling
from titan_dit.config.section import UserError
from titan_dit.trained_model import load_trained

FIXTURE = Path(__file__).resolve().parent / "fixtures" / "dit_reference.safetensors"
NUMBERS = load_file(FIXTURE)
STATE = {k.removeprefix("model."): v for k, v in NUMBERS.items() if k.startswith("model.")}
CPU = torch.device("cpu")


def titan_dit(*words, cwd):
    return commands.run([sys.executable, "-m", "titan_dit", *words], cwd)


def done_well(done):
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """`imported`: the fixture as a checkpoint, with scale 1."""
    cwd = tmp_path_factory.mktemp("converted")
    save_file(STATE, cwd / "original.safetensors")
    flags = ("--input", "original.safetensors", "--out", "imported", "--heads", 4, "--scale", 1)
    done = done_well(titan_dit("convert", *flags, cwd=cwd))
    assert "hidden_size 48, num_layers 2, num_heads 4, patch_size 2" in done.stdout
    assert "4x8x8, 10 classes, learned sigma" in done.stdout
    assert done.stderr == ""
    return cwd


def predicted(cwd, **inputs):
    save_file(inputs, cwd / "in.safetensors")
    flags = ("--run", "imported", "--input", "in.safetensors", "--out", "out.safetensors")
    done_well(titan_dit("predict", *flags, "--batch-size", 3, cwd=cwd))
    return load_file(cwd / "out.safetensors")


def close(found, expected):
    return (found - expected).abs().max() < 1e-5 * expected.abs().max()


def test_the_network_predicts_what_the_original_does(converted):
    found = predicted(converted, x=NUMBERS["io.x"], t=NUMBERS["io.t"], y=NUMBERS["io.y"])
    assert set(found) == {"out"}
    assert close(found["out"], NUMBERS["io.out"])


def test_its_losses_are_those_of_the_original(converted):
    inputs = {name: NUMBERS[f"io.{name}"] for name in ("x", "t", "y", "noise")}
    found = predicted(converted, **inputs)
    for ours, theirs in (("loss_mse", "mse"), ("loss_vb", "vb"), ("loss", "loss")):
        assert close(found[ours], NUMBERS[f"io.loss_{theirs}"]), ours


def test_ddim_ends_where_the_original_ends(converted):
    labels = NUMBERS["io.y"].to(torch.uint8)
    save_file({"noise": NUMBERS["io.ddim_z"], "labels": labels}, converted / "z.safetensors")
    flags = ("--noise", "z.safetensors", "--sampler", "ddim", "--steps", 10, "--cfg-scale", 1)
    done_well(
        sample(
            "--run", "imported", "--out", "s.safetensors", *flags, "--batch-size", 2, cwd=converted
        )
    )
    drawn = load_file(converted / "s.safetensors")
    assert close(drawn["samples"], NUMBERS["io.ddim10"])
    assert drawn["labels"].tolist() == [0, 8, 4, 0, -1]


def test_every_bit_comes_back_in_the_originals_names(converted):
    for name in ("back.safetensors", "back.pt"):
        convert.main(
            convert.ConvertFlags(input=str(converted / "imported"), out=str(converted / name))
        )
    back = load_file(converted / "back.safetensors")
    pickled = torch.load(converted / "back.pt", weights_only=True)
    assert back.keys() == pickled.keys() == STATE.keys()
    for name, tensor in STATE.items():
        assert torch.equal(back[name], tensor)
        assert torch.equal(pickled[name], tensor)
    # Exported files store the number of heads.
    source, target = (str(converted / name) for name in ("back.safetensors", "again"))
    convert.main(convert.ConvertFlags(input=source, out=target))
    # Nothing is overwritten, in either direction.
    for one, other in ((source, target), (target, source)):
        with pytest.raises(UserError, match="exists"):
            convert.main(convert.ConvertFlags(input=one, out=other))


def converted_again(cwd, name, **flags):
    """Export as `name`, import it again, and return the objective."""
    run, file, back = (str(cwd / part) for part in (name, f"{name}.safetensors", f"{name}_back"))
    convert.main(convert.ConvertFlags(input=run, out=file))
    convert.main(convert.ConvertFlags(input=file, out=back, **flags))
    return load_trained(find_checkpoint(Path(back), None), "ema", None, CPU).objective.config


def test_what_the_weights_were_trained_for_goes_with_them(converted, capsys):
    flags = {"heads": 4, "prediction": "v", "noise_schedule": "cosine"}
    source = str(converted / "original.safetensors")
    convert.main(convert.ConvertFlags(input=source, out=str(converted / "v"), **flags))
    assert "the original's sample.py expects" not in capsys.readouterr().out
    objective = converted_again(converted, "v")
    words = "trained for ddpm cosine v in 1000 steps: the original's sample.py expects ddpm linear"
    assert words in capsys.readouterr().out
    assert (objective.prediction, objective.noise_schedule) == ("v", "cosine")
    assert converted_again(converted, "v_back", prediction="x").prediction == "x"
    metadata = {"titan_dit.objective": json.dumps({"name": "ddpm", "steps": 500})}
    save_file(STATE, converted / "few.safetensors", metadata)
    source, target = str(converted / "few.safetensors"), str(converted / "few")
    convert.main(convert.ConvertFlags(input=source, out=target, heads=4))
    convert.main(convert.ConvertFlags(input=target, out=f"{target}.pt"))
    assert "trained for ddpm linear eps in 500 steps" in capsys.readouterr().out
    save_file(STATE, source, {"titan_dit.objective": json.dumps({"name": "ddpm", "steps": 5})})
    with pytest.raises(
        UserError, match=r"^--input .*few\.safetensors: \[objective\] steps=5 must be"
    ):
        convert.main(convert.ConvertFlags(input=source, out=f"{target}_5", heads=4))


def test_a_network_without_learned_sigma_is_read_and_drawn_from(converted):
    rows = torch.arange(32).view(4, 8)[:, :4].flatten()
    state = {k: v[rows] if k.startswith("final_layer.linear") else v for k, v in STATE.items()}
    save_file(state, converted / "fixed.safetensors")
    source, target = str(converted / "fixed.safetensors"), str(converted / "fixed")
    convert.main(convert.ConvertFlags(input=source, out=target, heads=4))
    assert not load_trained(Path(target), "ema", None, CPU).objective.config.learn_sigma
    out = str(converted / "fixed_samples.safetensors")
    sampling.main(sampling.SampleFlags(run=target, out=out, num=2, steps=3, sampler="ddpm"))
    assert load_file(out)["samples"].isfinite().all()


def test_moments_that_do_not_fit_are_left_out_in_words(converted, capsys):
    whole = adam_state()
    whole["state"].pop(next(iter(whole["state"])))
    torch.save({"model": STATE, "opt": whole}, converted / "part.pt")
    target = str(converted / "part")
    convert.main(convert.ConvertFlags(input=str(converted / "part.pt"), out=target, heads=4))
    assert "AdamW state dropped" in capsys.readouterr().out
    assert not checkpoint.holds(Path(target), "optimizer")


class Evil:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def test_nothing_hidden_in_a_checkpoint_is_executed(converted, monkeypatch):
    monkeypatch.chdir(converted)
    shutil.copytree("imported", "evil")
    (converted / "evil" / ".metadata").write_bytes(pickle.dumps(Evil()))
    manifest = read_record(Path("imported"))
    del manifest["files"]["tensors.json"]  # As in checkpoints of older versions.
    manifest["files"][".metadata"] = checkpoint.describe(Path("evil/.metadata"))
    manifest["digest"] = record.digest_of(manifest)
    (converted / "evil" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"it imports posix\.mkdir. Nothing was loaded"):
        convert.main(convert.ConvertFlags(input="evil", out="evil.pt"))
    with pytest.raises(UserError, match="not plain DCP metadata"):
        checkpoint.holds(Path("evil"), "model")
    assert not (converted / "executed").exists()
    assert not (converted / "evil.pt").exists()


def adam_state():
    """AdamW state after 1,000 steps of tiny gradients; a new AdamW would take large steps."""
    trained = [number for number, name in enumerate(STATE) if name != "pos_embed"]
    shapes = dict(enumerate(tensor.shape for tensor in STATE.values()))
    state = {
        number: {
            "step": torch.tensor(1000.0),
            "exp_avg": torch.zeros(shapes[number]),
            "exp_avg_sq": torch.full(shapes[number], 100.0),
        }
        for number in trained
    }
    return {"state": state, "param_groups": [{"params": list(shapes)}]}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run from imported weights whose EMA and model weights differ."""
    cwd = tmp_path_factory.mktemp("trained")
    ema = {name: tensor if name == "pos_embed" else tensor / 2 for name, tensor in STATE.items()}
    torch.save({"ema": ema, "model": STATE, "opt": adam_state()}, cwd / "original.pt")
    flags = ("--input", "original.pt", "--out", "imported", "--heads", 4)
    assert "after 1,000 steps" in done_well(titan_dit("convert", *flags, cwd=cwd)).stdout
    done_well(train(*START, "--training.steps", 3, cwd=cwd))
    return cwd


SIZES = {"hidden_size": 48, "num_layers": 2, "num_heads": 4, "patch_size": 2}
SHAPE = {"latent_size": 8, "in_channels": 4, "num_classes": 10}
START = (
    *("--objective.name", "ddpm", "--data.name", "synthetic", "--checkpoint.resume", "imported"),
    *(word for key, value in (SIZES | SHAPE).items() for word in (f"--model.{key}", value)),
    *("--data.latent_size", 8, "--data.channels", 4, "--data.num_classes", 10),
    *("--data.count", 64, "--training.global_batch_size", 8, "--ema.decays", 0.9999),
    *("--lr_scheduler.warmup_steps", 0, "--optimizer.lr", 1e-5),
    *("--metrics.every", 1, "--metrics.tensorboard", "false", "--sampling.every", 0),
)


def weights_of(path, which):
    restored = load_trained(path, which, None, CPU)
    return {name: p.detach() for name, p in restored.network.named_parameters()}


def test_training_starts_from_imported_weights_and_averages(trained):
    imported, run = trained / "imported", trained / "outputs" / "digits"
    assert [row["step"] for row in metrics(run)] == [1, 2, 3]
    last = find_checkpoint(run, None)
    # AdamW continues the imported moments; fresh ones would be 3e-5 after three steps.
    for which, most in (("model", 1e-5), ("ema", 1e-3)):
        before, after = weights_of(imported, which), weights_of(last, which)
        moved = max((after[name] - before[name]).abs().max() for name in before)
        assert 0 < moved < most, which
    ema, model = weights_of(imported, "ema"), weights_of(imported, "model")
    assert torch.equal(ema["blocks.0.mlp.up.weight"] * 2, model["blocks.0.mlp.up.weight"])


def test_a_run_from_imported_weights_resumes_like_any_other(trained):
    done_well(train(*START, "--training.steps", 5, cwd=trained))
    assert [row["step"] for row in metrics(trained / "outputs" / "digits")] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("which", ["ema", "model"])
def test_trained_weights_are_written_in_the_originals_names(trained, which):
    run, name = "outputs/digits", f"{which}.safetensors"
    done_well(titan_dit("convert", "--input", run, "--out", name, "--weights", which, cwd=trained))
    done_well(titan_dit("convert", "--input", name, "--out", f"{which}_again", cwd=trained))
    again = weights_of(trained / f"{which}_again", "model")
    for key, tensor in weights_of(find_checkpoint(trained / run, None), which).items():
        assert torch.equal(again[key], tensor), key


def test_samples_of_imported_weights_are_in_the_units_of_the_autoencoder(trained):
    flags = ("--num", 4, "--steps", 2, "--cfg-channels", 3, "--cfg-scale", 1.5)
    done = sample("--run", "imported", "--out", "s.safetensors", *flags, cwd=trained)
    assert "ddim, 2 steps" in done_well(done).stdout
    drawn = load_file(trained / "s.safetensors")["samples"]
    assert drawn.shape == (4, 4, 8, 8)
    assert load_trained(trained / "imported", "ema", None, CPU).objective.data.scale == 0.18215


def test_an_average_that_would_be_forgotten_is_not_begun_with(trained):
    done = train(*START, "--ema.warmup", "true", "--job.name", "warm", cwd=trained)
    assert done.returncode == 2
    assert "--ema.warmup false" in done.stderr


def test_every_average_begins_at_the_imported_one(trained):
    flags = ("--ema.decays", 0.5, 0.9, "--training.steps", 1, "--optimizer.lr", 1e-30)
    done_well(train(*START, *flags, "--job.name", "two", cwd=trained))
    expected = weights_of(trained / "imported", "ema")["blocks.0.mlp.up.weight"]
    path, model = (
        find_checkpoint(trained / "outputs" / "two", None),
        weights_of(trained / "imported", "model"),
    )
    for decay in (0.5, 0.9):
        found = dict(load_trained(path, "ema", decay, CPU).network.named_parameters())
        moved = torch.lerp(model["blocks.0.mlp.up.weight"], expected, decay)
        torch.testing.assert_close(found["blocks.0.mlp.up.weight"].detach(), moved)


def test_another_model_is_not_trained_from_imported_weights(trained):
    done = train(*START, "--model.num_layers", 3, "--job.name", "other", cwd=trained)
    assert done.returncode == 2
    assert "[model] num_layers: 2 -> 3" in done.stderr
    done = train(*START, "--objective.prediction", "v", "--job.name", "other", cwd=trained)
    assert done.returncode == 2
    assert '[objective] prediction: "eps" -> "v"' in done.stderr


BAD = {
    "no file": (("--input", "nothing.pt", "--out", "new"), "nothing.pt: no such file"),
    "heads": (("--input", "original.safetensors", "--out", "new"), "--heads N"),
    "there": (("--input", "original.safetensors", "--out", "imported", "--heads", 4), "exists"),
    "folder": (("--input", "original.safetensors", "--out", "new.pt"), "a checkpoint is a folder"),
    "no run": (("--input", ".", "--out", "new.pt"), "--input .: no checkpoint found"),
    "other frequencies": (("--input", "imported", "--out", "new"), 'timestep_frequencies="dit"'),
    "a text file": (("--input", "imported", "--out", "new.txt"), "name a .pt or .safetensors file"),
    "import flag": (("--input", "imported", "--out", "new.pt", "--heads", 4), "flag of an export"),
    "export flag": (("--input", "z.safetensors", "--out", "new", "--step", 4), "flag of an import"),
    "an object store": (("--input", "imported", "--out", "s3://a/b.pt"), "--out s3://a/b.pt: give"),
    "here": (("--input", "original.safetensors", "--out", "."), "--out .: give the path of a new"),
    "no DiT": (("--input", "z.safetensors", "--out", "new"), "is no DiT"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_converted_is_one_error_and_leaves_nothing(case, converted, monkeypatch):
    flags, words = BAD[case]
    save_file({"noise": torch.ones(1)}, converted / "z.safetensors")
    monkeypatch.chdir(converted)
    names = {"--input": "input", "--out": "out"}
    given = {
        names.get(flag, flag[2:]): value
        for flag, value in zip(flags[::2], flags[1::2], strict=True)
    }
    with pytest.raises(UserError) as caught:
        convert.main(convert.ConvertFlags(**given))
    assert words in str(caught.value)
    assert not list(converted.glob("new*"))


def test_an_error_is_one_line_and_an_exit_code(converted):
    done = titan_dit("convert", "--input", "nothing.pt", "--out", "new", cwd=converted)
    assert done.returncode == 2
    assert done.stderr == "error: --input nothing.pt: no such file. Correct the path.\n"


BAD_INPUTS = {
    "missing": ({"y": None}, "y missing"),
    "shape": ({"x": torch.ones(2, 4, 4, 4)}, "the network takes [b, 4, 8, 8]"),
    "rows": ({"t": torch.ones(3)}, "t is [3]"),
    "label": ({"y": torch.tensor([11, 0])}, "integers up to 10"),
    "time": ({"t": torch.tensor([1000.0, 0.0])}, "t must be between 0 and 999"),
    "step": ({"t": torch.tensor([1000.0, 0.0]), "noise": torch.ones(2, 4, 8, 8)}, "0 and 999"),
    "fraction": ({"t": torch.tensor([3.5, 0]), "noise": torch.ones(2, 4, 8, 8)}, "integer"),
    "noise": ({"noise": torch.ones(2, 4, 8, 4)}, "noise is [2, 4, 8, 4]"),
}


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_inputs_that_do_not_fit_are_one_error(case, converted, monkeypatch):
    change, words = BAD_INPUTS[case]
    tensors = {"x": torch.ones(2, 4, 8, 8), "t": torch.ones(2), "y": torch.tensor([0, 1])} | change
    save_file({k: v for k, v in tensors.items() if v is not None}, converted / "bad.safetensors")
    monkeypatch.chdir(converted)
    options = predict.PredictFlags(
        run="imported", input="bad.safetensors", out="no.safetensors", device="cpu"
    )
    with pytest.raises(UserError) as caught:
        predict.main(options)
    assert words in str(caught.value)
    assert not (converted / "no.safetensors").exists()
