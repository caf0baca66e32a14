"""`python -m titan_dit runs DIR...`: the table, the picture and the errors."""

import json
import sys

import commands
import numpy as np
import pytest
from commands import only_error
from PIL import Image, ImageColor

from titan_dit.observe.curve import COLOURS

BASE = {"job.name": "x", "optimizer.lr": 0.001, "training.steps": 40, "data.name": "digits"}


def make_run(folder, losses, **keys):
    """The files of a run: a row every 10 steps, validation on the last one."""
    folder.mkdir(parents=True)
    tables = {}
    for key, value in (BASE | {"job.name": folder.name} | keys).items():
        section, name = key.split(".")
        tables.setdefault(section, []).append(f"{name} = {json.dumps(value)}\n")
    text = "".join(f"[{section}]\n{''.join(lines)}" for section, lines in tables.items())
    (folder / "config.toml").write_text("format = 4\n" + text)
    rows = [
        {"step": step, "loss": loss, "smooth_loss": 5.0 if loss is None else loss + 1}
        for step, loss in zip(range(10, 1000, 10), losses, strict=False)
    ]
    if rows:
        rows[-1]["validation_loss"] = 0.125
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def cwd(tmp_path_factory):
    """Three runs in outputs, and one elsewhere that has begun no step."""
    cwd = tmp_path_factory.mktemp("runs")
    make_run(cwd / "outputs" / "low", [4.0, 2.0, 1.0, 0.5])
    make_run(cwd / "outputs" / "high", [9.0, 8.0, 7.5], **{"optimizer.lr": 0.01})
    make_run(cwd / "outputs" / "muon", [4.0, None], **{"optimizer.name": "muon"})
    make_run(cwd / "new", [])
    (cwd / "outputs" / "notes").mkdir()
    checkpoint = cwd / "outputs" / "low" / "checkpoints" / "step-00000040"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    return cwd


def runs(*words, cwd, columns=120):
    command = [sys.executable, "-m", "titan_dit", "runs", *words]
    return commands.run(command, cwd, COLUMNS=columns)


def rows_of(done):
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


def test_runs_are_compared_by_their_losses_and_by_what_differs(cwd):
    *rows, drew = rows_of(runs("outputs", "outputs/low", "new", cwd=cwd))
    assert rows == [
        ["run", "step", "loss", "smooth", "validation", "optimizer.lr", "optimizer.name"],
        ["high", "30", "7.5000", "8.5000", "0.1250", "0.01", "-"],
        ["low", "40", "0.5000", "1.5000", "0.1250", "0.001", "-"],
        ["muon", "20", "not", "finite", "5.0000", "0.1250", "0.001", '"muon"'],
        ["new", "-", "-", "-", "-", "0.001", "-"],
    ]
    assert drew == ["drew", "runs.png"]
    pixels = np.asarray(Image.open(cwd / "runs.png"))[:, :800]
    heights = [
        np.nonzero((pixels == ImageColor.getrgb(colour)).all(-1))[0].mean()
        for colour in COLOURS[:2]
    ]
    assert heights[0] + 100 < heights[1]  # From the top: the first run's losses are higher.


def test_an_older_run_differs_in_values_and_not_in_the_names_of_keys(tmp_path):
    old = {"model.hidden": 64, "parallel.prefetch": 0, "checkpoint.init": "", "remat.mode": "full"}
    new = {"model.hidden_size": 64, "activation_checkpoint.mode": "none"}
    make_run(tmp_path / "old", [1.0], **old)
    make_run(tmp_path / "new", [1.0], **new)
    header = rows_of(runs("old", "new", cwd=tmp_path))[0]
    assert header[5:] == ["activation_checkpoint.mode"]


def test_a_table_wider_than_the_terminal_is_turned(cwd):
    rows = rows_of(runs("outputs", "--out", "narrow.png", cwd=cwd, columns=60))
    assert rows[0] == ["run", "high", "low", "muon"]
    assert ["optimizer.lr", "0.01", "0.001", "0.001"] in rows
    assert (cwd / "narrow.png").is_file()


@pytest.mark.parametrize(
    "path",
    [
        "outputs/low/checkpoints",
        "outputs/low/checkpoints/step-00000040",
        "outputs/low/config.toml",
    ],
)
def test_a_checkpoint_and_a_file_mean_their_run(cwd, path):
    assert rows_of(runs(path, "--out", "one.png", cwd=cwd))[1][:2] == ["low", "40"]


def test_runs_without_losses_have_no_picture(cwd):
    done = runs("new", "--out", "none.png", cwd=cwd)
    assert rows_of(done)[-1][:2] == ["no", "curves:"]
    assert not (cwd / "none.png").exists()


BAD = {
    "no folder": (("nothing",), "runs nothing: no such folder"),
    "no run": (("outputs/notes",), "no run found. Give run directories (outputs/digits)"),
    "none": ((), "give run directories"),
    "suffix": (("outputs", "--out", "a.svg"), "name a .png file"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_run_is_one_error(cwd, case):
    words, wanted = BAD[case]
    assert wanted in only_error(runs(*words, cwd=cwd))
