"""Weights of SiT: predictions and samples against an implementation written here, and bits back."""

import argparse
import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from commands import train
from safetensors.torch import load_file, save_file

from titan_dit.checkpoint.record import read_record
from titan_dit.commands import convert
from titan_dit.commands.flags import ConvertFlags
from titan_dit.config.section import UserError
from titan_dit.diffusion import drawing
from titan_dit.execution import first_of
from titan_dit.interop import original_dit
from titan_dit.interop.original_dit import Original
from titan_dit.models.dit_config import DiTConfig
from titan_dit.rng import SampleRNG
from titan_dit.trained_model import load_trained

CPU = torch.device("cpu")
HEADS, LAYERS, CHANNELS, PATCH = 4, 2, 4, 2
CONFIG = DiTConfig(
    hidden_size=48, num_layers=LAYERS, num_heads=HEADS, patch_size=PATCH, latent_size=8,
    in_channels=CHANNELS,
    num_classes=7,
)  # fmt: skip
ARGUMENTS = {
    "model": "SiT-XL/2",
    "path_type": "Linear",
    "prediction": "velocity",
    "loss_weight": None,
    "image_size": 256,
}


def state(seed=0, outputs=2 * CHANNELS):
    """A tiny SiT: the names of the released files, random weights, positions drifted by an EMA."""
    torch.manual_seed(seed)
    shapes = Original(CONFIG, outputs).shapes()
    weights = {name: torch.randn(shape) * 0.15 for name, shape in shapes.items()}
    drift = 1.6e-4 * torch.rand(shapes["pos_embed"])
    return weights | {"pos_embed": original_dit.positions(CONFIG) - drift}


def linear(weights, name, x):
    return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])


def norm(x, shift, scale):
    return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale[:, None]) + shift[:, None]


def velocity(w, x, t, y):
    """SiT's network: time t from 0 (noise) to 1 (data), as it is; the first half of the outputs."""
    rows = torch.arange(128) / 128
    angles = t[:, None] * torch.exp(-rows * torch.log(torch.tensor(10000.0)))
    waves = torch.cat((angles.cos(), angles.sin()), 1)
    time = linear(w, "t_embedder.mlp.2", F.silu(linear(w, "t_embedder.mlp.0", waves)))
    c = F.silu(time + w["y_embedder.embedding_table.weight"][y])
    kernel, bias = (w[f"x_embedder.proj.{kind}"] for kind in ("weight", "bias"))
    tokens = F.conv2d(x, kernel, bias, stride=PATCH).flatten(2).mT
    tokens = tokens + original_dit.positions(CONFIG)
    b, n, d = tokens.shape
    for i in range(LAYERS):
        parts = linear(w, f"blocks.{i}.adaLN_modulation.1", c).chunk(6, 1)
        qkv = linear(w, f"blocks.{i}.attn.qkv", norm(tokens, *parts[:2]))
        q, k, v = qkv.view(b, n, 3, HEADS, d // HEADS).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d)
        tokens = tokens + parts[2][:, None] * linear(w, f"blocks.{i}.attn.proj", mixed)
        wide = linear(w, f"blocks.{i}.mlp.fc1", norm(tokens, *parts[3:5]))
        narrow = linear(w, f"blocks.{i}.mlp.fc2", F.gelu(wide, approximate="tanh"))
        tokens = tokens + parts[5][:, None] * narrow
    shift, scale = linear(w, "final_layer.adaLN_modulation.1", c).chunk(2, 1)
    found = linear(w, "final_layer.linear", norm(tokens, shift, scale))
    grid = found.view(b, 4, 4, PATCH, PATCH, -1).permute(0, 5, 1, 3, 2, 4)
    return grid.reshape(b, -1, 8, 8)[:, :CHANNELS]


def converted(source, target, **flags):
    convert.main(ConvertFlags(input=str(source), out=str(target), **flags))
    return Path(target)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """`plain.safetensors` as released, `trained.pt` as its train.py saves; both as checkpoints."""
    folder = tmp_path_factory.mktemp("sit")
    save_file(state(), folder / "plain.safetensors")
    arguments = argparse.Namespace(**ARGUMENTS)
    both = {"model": state(1), "ema": state(), "opt": {}, "args": arguments}
    torch.save(both, folder / "trained.pt")
    converted(folder / "plain.safetensors", folder / "plain", format="sit", heads=HEADS)
    converted(folder / "trained.pt", folder / "trained", heads=HEADS)
    return folder


@pytest.mark.parametrize(("name", "which", "seed"), [("plain", "model", 0), ("trained", "ema", 0)])
def test_predictions_are_those_of_sit(files, name, which, seed):
    run = load_trained(files / name, which, None, CPU)
    x, t, y = torch.randn(3, 4, 8, 8), torch.tensor([0.0, 0.35, 1.0]), torch.tensor([1, 6, 7])
    with torch.no_grad():
        expected = velocity(state(seed), x, t, y)
        found = run.model(x, t, torch.tensor([1, 6, -1]))
    assert found.shape == (3, 2 * CHANNELS, 8, 8)
    assert (found[:, :CHANNELS] - expected).abs().max() <= 1e-5 * expected.abs().max()
    path = run.diffusion("test").config
    assert (path.direction, path.time_scale, path.learn_sigma) == ("to_data", 1.0, True)
    assert (path.timesteps, path.shift) == ("uniform", 1.0)
    assert run.diffusion("test").data.scale == 0.18215


def test_samples_are_those_of_sits_own_way_from_noise_to_data(files):
    run = load_trained(files / "plain", "ema", None, CPU)
    diffusion, labels, steps = run.diffusion("test"), torch.tensor([1, 6]), 8
    noise = torch.randn(2, 4, 8, 8)
    weights, null = state(), torch.full((2,), 7)
    with torch.no_grad():
        x = noise
        for number in range(steps):
            t = torch.full((2,), number / steps)
            with_label, without = velocity(weights, x, t, labels), velocity(weights, x, t, null)
            x = x + (without + 4 * (with_label - without)) / steps
        tokens = drawing.generate(
            lambda inputs, static: first_of(run.network(inputs, static)),
            diffusion,
            {"labels": labels},
            torch.arange(2),
            seed=0,
            sampler=drawing.sampler_of(diffusion.config, "euler"),
            steps=steps,
            guidance=drawing.Guidance(4.0),
            noise=diffusion.model.tokenize(noise),
        )
    found = diffusion.model.detokenize(tokens)
    assert (found - x).abs().max() <= 1e-4 * x.abs().max()
    assert (x - noise).abs().max() > 0.1


def test_training_goes_on_with_sits_loss(files):
    """Its loss: the mean of (v(t x + (1 - t) noise, t) - (x - noise))^2."""
    run = load_trained(files / "plain", "ema", None, CPU)
    diffusion, rng = run.diffusion("test"), SampleRNG(0, torch.arange(3))
    clean, noise, y = torch.randn(3, 4, 8, 8), torch.randn(3, 4, 8, 8), torch.tensor([0, 3, 6])
    t = diffusion.timesteps_of(rng)
    model = diffusion.model
    corrupted = diffusion.corrupt(model.tokenize(clean), t, model.tokenize(noise))
    with torch.no_grad():
        inputs = {**corrupted.inputs, "labels": y}
        prediction = first_of(run.network(inputs, model.static(CPU)))
        loss = diffusion.loss({"prediction": prediction}, corrupted.targets).mean(1)
        share = t[:, None, None, None]
        found = velocity(state(), share * clean + (1 - share) * noise, t, y)
    expected = (found - (clean - noise)).square().mean((1, 2, 3))
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_the_same_bits_go_back_into_a_file(files, tmp_path, suffix, capsys):
    for which, seed in (("ema", 0), ("model", 1)):
        file = tmp_path / f"{which}{suffix}"
        converted(files / "trained", file, weights=which, format="sit")
        assert "a file of SiT" in capsys.readouterr().out
        is_pickled = suffix == ".pt"
        back = torch.load(file, weights_only=True) if is_pickled else load_file(file)
        expected = state(seed)
        assert back.keys() == expected.keys()
        for name, tensor in expected.items():
            if name != "pos_embed":
                assert torch.equal(back[name], tensor), name
        # What an average has drifted from is written as it was.
        assert torch.equal(back["pos_embed"], original_dit.positions(CONFIG))
        # Each tensor has storage of its own, and no more than it needs.
        size = sum(tensor.nbytes for tensor in expected.values())
        assert size < file.stat().st_size < 1.2 * size
    assert [p.name for p in tmp_path.iterdir() if "partial" in p.name] == []


def test_what_wrote_a_file_is_known_without_a_flag(files, tmp_path, capsys):
    converted(files / "trained", tmp_path / "a.safetensors")
    assert "a file of SiT" in capsys.readouterr().out
    again = load_trained(converted(tmp_path / "a.safetensors", tmp_path / "a"), "ema", None, CPU)
    assert (
        again.diffusion("test").config
        == load_trained(files / "trained", "ema", None, CPU).diffusion("test").config
    )
    with pytest.raises(UserError, match="--format dit, but it is a file of SiT"):
        converted(tmp_path / "a.safetensors", tmp_path / "x", format="dit")
    converted(files / "trained", tmp_path / "b.safetensors", format="dit")
    said = capsys.readouterr().out
    assert "a file of the original DiT" in said
    assert "trained for rectified_flow: the original's sample.py expects ddpm linear" in said
    # Without a flag a plain file is the original DiT's, whatever its name.
    for name, doubts in (("site", False), ("SiT-XL-2", True), ("dit_sit", True)):
        file = shutil.copy(files / "plain.safetensors", tmp_path / f"{name}.safetensors")
        plain = converted(file, tmp_path / name, heads=HEADS)
        assert ("warning: by its name the file is SiT's" in capsys.readouterr().out) == doubts
    assert read_record(plain)["config"]["objective"]["name"] == "ddpm"


def test_a_network_without_the_second_half_is_read(tmp_path):
    save_file(state(outputs=CHANNELS), tmp_path / "a.safetensors")
    run = converted(tmp_path / "a.safetensors", tmp_path / "a", format="sit", heads=HEADS)
    assert not load_trained(run, "ema", None, CPU).diffusion("test").config.learn_sigma


BAD = {
    "path": ({"path_type": "GVP"}, {}, "SiT's --path-type GVP: titan_dit has path-type Linear"),
    "score": ({"prediction": "score"}, {}, "SiT's --prediction score"),
    "format": ({}, {"format": "dit"}, "--format dit, but it is a file of SiT"),
    "eps": ({}, {"prediction": "eps"}, "--prediction eps: weights of rectified_flow have no pre"),
    "noise": ({}, {"noise_schedule": "cosine"}, "--noise-schedule cosine: weights of rect"),
}


@pytest.mark.parametrize("case", BAD)
def test_weights_of_another_path_or_prediction_are_refused(case, tmp_path):
    changed, flags, words = BAD[case]
    content = {"ema": state(), "args": argparse.Namespace(**(ARGUMENTS | changed))}
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(UserError) as caught:
        converted(tmp_path / "a.pt", tmp_path / "new", heads=HEADS, **flags)
    assert words in str(caught.value)
    assert not list(tmp_path.glob("new*"))


OTHER = {
    "ddpm": ({"name": "ddpm"}, r'\[objective\] name="ddpm", not "rectified_flow"'),
    "direction": ({"name": "rectified_flow", "time_scale": 1.0}, 'direction="to_noise", not "to_d'),
    "time": ({"name": "rectified_flow", "direction": "to_data"}, r"time_scale=1000.0, not 1.0"),
}


@pytest.mark.parametrize("case", OTHER)
def test_a_run_of_another_objective_is_no_file_of_sit(case, tmp_path):
    from titan_dit.data.latent_facts import LatentFacts
    from titan_dit.interop import imported

    objective, words = OTHER[case]
    outputs = 2 * CHANNELS if case == "ddpm" else CHANNELS
    original = Original(CONFIG, outputs)
    weights = original.to_ours(state(outputs=outputs))
    facts = LatentFacts(shape=CONFIG.sample_shape, count=0, num_classes=7)
    tensors = {"model": weights, "ema": {imported.EMA_DECAY: weights}}
    imported.save(tmp_path / "run", tensors, imported.dit_record(CONFIG, objective, facts))
    with pytest.raises(UserError, match=words):
        converted(tmp_path / "run", tmp_path / "new.pt", format="sit")
    assert not list(tmp_path.glob("new*"))
    file = converted(tmp_path / "run", tmp_path / "names.safetensors")
    with pytest.raises(UserError, match=words):
        converted(file, tmp_path / "new", format="sit")


def test_a_flow_of_before_these_keys_is_no_file_of_sit(tmp_path):
    metadata = {"titan_dit.objective": json.dumps({"name": "rectified_flow"})}
    save_file(state(outputs=CHANNELS), tmp_path / "a.safetensors", metadata)
    with pytest.raises(UserError, match='direction="to_noise", not "to_data"'):
        converted(tmp_path / "a.safetensors", tmp_path / "new", format="sit", heads=HEADS)


def test_a_run_starts_at_the_weights_and_goes_back_into_a_file(files, tmp_path):
    shape = {"latent_size": 8, "num_classes": 7}
    sizes = {"hidden_size": 48, "num_layers": LAYERS, "num_heads": HEADS, "patch_size": PATCH}
    flags = (
        *("--objective.name", "rectified_flow", "--objective.timesteps", "uniform"),
        *("--objective.learn_sigma", "true", "--data.name", "synthetic", "--data.count", 64),
        *(word for key, value in (sizes | shape).items() for word in (f"--model.{key}", value)),
        *(word for key, value in shape.items() for word in (f"--data.{key}", value)),
        *("--model.in_channels", CHANNELS, "--data.channels", CHANNELS),
        *("--training.global_batch_size", 8, "--training.steps", 2, "--optimizer.lr", 1e-6),
        *("--lr_scheduler.warmup_steps", 0, "--metrics.tensorboard", "false"),
        *("--sampling.every", 2, "--sampling.steps", 2, "--sampling.num", 4),
        *("--checkpoint.init", files / "plain"),
    )
    sit = ("--objective.direction", "to_data", "--objective.time_scale", 1)
    done = train(*flags, *sit, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = done.stdout + done.stderr
    # Not even a warning: only the data's units are unknown.
    assert "[objective]" not in "".join(line for line in said.splitlines() if "warning" in line)
    run = tmp_path / "outputs" / "digits"
    assert list(run.rglob("*.png"))
    back = load_file(converted(run, tmp_path / "back.safetensors", format="sit", weights="model"))
    moved = [(back[name] - tensor).abs().max() for name, tensor in state().items()]
    assert 0 < max(moved) < 2e-4
    done = train(*flags, "--job.name", "other", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    warned = [x for x in (done.stdout + done.stderr).splitlines() if "trained with others" in x]
    assert '[objective] direction: "to_data" -> "to_noise"' in warned[0]
    # To go on with the moments, the objective must be the same.
    resumed = *flags[:-2], "--checkpoint.resume", files / "plain", "--job.name", "resumed"
    done = train(*resumed, cwd=tmp_path)
    assert done.returncode == 2
    assert '[objective] direction: "to_data" -> "to_noise"' in done.stderr
    assert "[objective] time_scale: 1.0 -> 1000.0" in done.stderr
