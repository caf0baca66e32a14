"""Runs the commands of docs/tutorial.md: as written, and shortened on a few pictures."""

import json
import re
import shlex
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from commands import ROOT, measured, run

from titan_dit.commands.data_example import SOURCE
from titan_dit.pictures import output
from titan_dit.pictures.library import diffusers
from titan_dit.scores import features, pictures, score

SMALLER = {
    "titan_dit.train": "--training.steps 2 --sampling.every 0 --training.global_batch_size 8",
    "titan_dit sample": "--steps 2 --num 10",
    "titan_dit evaluate": "--steps 2 --num 12 --features efficientnet:32 --metrics fid",
}
CPU_SECONDS = 600
"""That the whole tutorial may take."""
FEW = 40
"""Every so many of the pictures is in the short run."""


def blocks(kind):
    page = (ROOT / "docs" / "tutorial.md").read_text()
    return "".join(re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL))


def follow(folder, smaller):
    """Run every command of the page in a folder like the repository; seconds of CPU time."""
    (folder / "examples").mkdir()
    (folder / "examples" / "vae").symlink_to(ROOT / "examples" / "vae")
    commands = blocks("bash").splitlines()
    assert len(commands) == 6
    seconds = 0.0
    for command in commands:
        if smaller and "data example" in command:
            lay_out(folder / "emoji")
            continue
        here = command.replace("NGPU=1 ./run_train.sh", "python -m titan_dit.train")
        words = shlex.split(re.sub("^python", sys.executable, here))
        for part, flags in smaller.items():
            words += shlex.split(flags) if part in here else []
        if smaller:
            done = run(words, folder)
        else:
            done, used = measured(words, folder, timeout=1800)
            spent = used.ru_utime + used.ru_stime
            print(f"{spent:6.1f} s of CPU: {command}")
            seconds += spent
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return seconds


def lay_out(folder):
    """Some of the pictures, as `data example` writes all."""
    lines = []
    for number, (line, picture) in enumerate(output.read_sheet(SOURCE / "pictures")):
        if number % FEW == 0 or line["label"] == "component":
            file = folder / line["file_name"]
            file.parent.mkdir(parents=True, exist_ok=True)
            picture.save(file)
            lines.append(json.dumps(line))
    (folder / "metadata.jsonl").write_text("\n".join(lines))


def run_pipeline(folder, monkeypatch):
    """The page's Python lines."""
    diffusers("the test").DiTPipeline.from_pretrained  # noqa: B018 - imported quietly.
    monkeypatch.chdir(folder)
    code = blocks("python").replace("num_inference_steps=25", "num_inference_steps=2")
    exec(compile(code, "tutorial.md", "exec"), {})
    assert (folder / "face.png").stat().st_size > 500


def test_the_tutorial_works_on_a_few_pictures(tmp_path, monkeypatch):
    monkeypatch.setenv("NGPU", "1")
    follow(tmp_path, SMALLER)
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert scores["samples"] == 12
    assert scores["labels"] == "as the reference"
    assert scores["frechet_distance"] > 0
    assert (tmp_path / "emoji.png").is_file()
    run_pipeline(tmp_path, monkeypatch)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_tutorial_draws_pictures_nearer_to_real_ones_than_blurred_ones(tmp_path, monkeypatch):
    monkeypatch.setenv("NGPU", "1")
    seconds = follow(tmp_path, {})
    scores = json.loads((tmp_path / "scores.json").read_text())
    network = features.load("efficientnet:96", "", torch.device("cpu"))
    real = pictures.open_folder(tmp_path / "emoji", 32, "test")
    rows = torch.cat([real.read(range(i, i + 1)) for i in chosen(real.count)])
    values = rows.permute(0, 3, 1, 2).float()
    small = F.interpolate(values, scale_factor=1 / 4, mode="area")
    blurred = F.interpolate(small, size=32, mode="bicubic").clamp(0, 255).round().byte()
    described = [
        score.statistics_of(torch.cat([network(part)[0] for part in torch.split(rows, 64)]), None)
        for rows in (blurred.permute(0, 2, 3, 1), real.read(range(real.count)))
    ]
    limit = score.frechet(*(one.moments for one in described))
    print(f"{seconds:.0f} s of CPU; drawn {scores}; blurred 4x {limit:.1f}")
    assert scores["frechet_distance"] < limit
    assert seconds < CPU_SECONDS
    run_pipeline(tmp_path, monkeypatch)


def chosen(count):
    """700 rows, drawn once."""
    return np.random.default_rng(0).permutation(count)[:700].tolist()
