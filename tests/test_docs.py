"""Runs the commands of docs/official-dit.md (an S/8 as the DiT), memory.md and optimizers.md."""

import re
import sys

import numpy as np
import pytest
import torch
from commands import ROOT, metrics, run
from safetensors.torch import load_file, save_file

from titan_dit.interop.original_dit import Original, positions
from titan_dit.models.dit_config import DiTConfig

CONFIG = DiTConfig(size="S/8", latent_size=32, in_channels=4, num_classes=1000)
SMALLER = {
    "titan_dit sample": "--steps 2",
    "titan_dit.train": (
        "--model.size S/8 --compile.enabled false --training.steps 2 --checkpoint.every 1 "
        "--training.global_batch_size 4 --training.microbatch_size 4 --sampling.every 0"
    ),
}


def make_inputs(folder):
    """The files of a user of the original DiT."""
    torch.manual_seed(0)
    shapes = Original(CONFIG, 8).shapes()
    state = {name: torch.randn(shape) * 0.02 for name, shape in shapes.items()}
    state["pos_embed"] = positions(CONFIG)
    torch.save(state, folder / "DiT-XL-2-256x256.pt")
    torch.save(state, folder / "SiT-XL-2-256x256.pt")
    inputs = {
        "x": torch.randn(2, 4, 32, 32),
        "t": torch.tensor([3, 900]),
        "y": torch.tensor([1, 2]),
    }
    save_file(inputs, folder / "in.safetensors")
    for name, shape in (("features", (1, 4, 32, 32)), ("labels", (1,))):
        (folder / "imagenet256" / f"imagenet256_{name}").mkdir(parents=True)
        for number in range(1000):
            is_label = name == "labels"
            value = np.array([number]) if is_label else np.random.randn(*shape).astype("float32")
            np.save(folder / "imagenet256" / f"imagenet256_{name}" / f"{number}.npy", value)


@pytest.mark.long
def test_the_page_of_memory_works_as_written(tmp_path):
    """With few steps: losses of [offload] are those without it, those of bf16 weights near."""
    page = (ROOT / "docs" / "memory.md").read_text()
    commands = "".join(re.findall(r"```bash\n(.*?)```", page, re.DOTALL)).splitlines()
    assert len(commands) == 4
    training = [command for command in commands if "run_train" in command]
    losses = []
    for number, command in enumerate([training[0].partition(" --precision")[0], *training]):
        here = command.replace("./run_train.sh", f"{sys.executable} -m titan_dit.train")
        here += f" --training.steps 4 --metrics.every 1 --sampling.every 0 --job.name run{number}"
        done = run(here.split(), tmp_path)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        losses.append([row["loss"] for row in metrics(tmp_path / "outputs" / f"run{number}")])
    plain, in_bf16, *on_host = losses
    assert len(plain) == 4
    assert on_host == [plain, plain]
    assert in_bf16 == pytest.approx(plain, rel=0.01)
    [command] = set(commands) - set(training)
    done = run(re.sub("^python", sys.executable, command).split(), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    [line] = re.findall(r"```\n(best .*)\n```", page)
    assert line in done.stdout


@pytest.mark.long
def test_the_page_of_optimizers_works_as_written(tmp_path):
    """With 160 steps: all begin at one loss and train; small states are said."""
    page = (ROOT / "docs" / "optimizers.md").read_text()
    commands = "".join(re.findall(r"```bash\n(.*?)```", page, re.DOTALL)).splitlines()
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    first, said = {}, {}
    for command in commands:
        here = command.replace("./run_train.sh", f"{sys.executable} -m titan_dit.train")
        words = f"{here} --training.steps 160 --metrics.every 1 --sampling.every 0".split()
        name = words[words.index("--job.name") + 1]
        done = run(words, tmp_path)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        losses = [row["loss"] for row in metrics(tmp_path / "outputs" / name)]
        assert len(losses) == 160
        assert sum(losses[-10:]) < 0.8 * sum(losses[:10]), name
        first[name], said[name] = losses[0], "moments of" in done.stdout + done.stderr
    assert first.keys() == {"adafactor", "prodigy", "small", "smallest", "muon"}
    assert first["smallest"] == pytest.approx(first.pop("muon"), rel=0.01)
    del first["smallest"]
    assert len(set(first.values())) == 1
    assert [name for name, value in said.items() if value] == ["small", "smallest"]


@pytest.mark.long
def test_the_way_from_the_original_dit_works_as_written(tmp_path):
    make_inputs(tmp_path)
    page = (ROOT / "docs" / "official-dit.md").read_text()
    commands = "".join(re.findall(r"```bash\n(.*?)```", page, re.DOTALL)).splitlines()
    assert len(commands) == 12
    for command in commands:
        here = command.replace("NGPU=8 ./run_train.sh", "python -m titan_dit.train")
        here = re.sub("^python", sys.executable, here)
        here += "".join(f" {flags}" for part, flags in SMALLER.items() if part in here)
        done = run(here.split(), tmp_path)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    assert load_file(tmp_path / "out.safetensors")["out"].shape == (2, 8, 32, 32)
    drawn = load_file(tmp_path / "samples.safetensors")
    assert drawn["labels"].tolist() == [207, 360, 387, 974, 88, 979, 417, 279]
    assert drawn["samples"].isfinite().all()
    trained = torch.load(tmp_path / "dit_xl2_trained.pt", weights_only=True)
    assert trained.keys() == torch.load(tmp_path / "DiT-XL-2-256x256.pt", weights_only=True).keys()
    sit = torch.load(tmp_path / "sit_trained.pt", weights_only=True)
    assert sit.keys() == trained.keys()
    assert load_file(tmp_path / "sit.safetensors")["samples"].isfinite().all()
    assert (tmp_path / "outputs" / "dit_xl2_tuned" / "checkpoints" / "step-00000002").is_dir()
