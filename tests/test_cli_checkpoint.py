"""`python -m titan_dit checkpoint list|verify|show` on the checkpoints of a run."""

import sys

import commands
import pytest
import torch
from commands import only_error, train
from safetensors.torch import save_file

from titan_dit import __main__
from titan_dit.config.section import UserError


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two checkpoints of two ranks, and an unfinished one."""
    cwd = tmp_path_factory.mktemp("listed")
    flags = ("--model.hidden_size", 32, "--training.steps", 4, "--checkpoint.every", 2)
    flags += ("--metrics.tensorboard", "false", "--sampling.every", 0)
    done = train(*flags, cwd=cwd, ranks=2)
    assert done.returncode == 0, done.stderr
    return cwd


def checkpoint(*words, cwd):
    return commands.run([sys.executable, "-m", "titan_dit", "checkpoint", *words], cwd)


def test_a_run_is_listed_verified_and_shown(run):
    done = checkpoint("list", "outputs/digits", cwd=run)
    assert done.returncode == 0, done.stderr
    header, *rows, where = done.stdout.splitlines()
    assert header.split() == ["step", "samples", "epoch", "MiB", "age", "files"]
    assert [row.split()[:3] for row in rows] == [["2", "256", "0.14"], ["4", "512", "0.28"]]
    assert all(row.endswith("all") for row in rows)
    assert where.startswith("in outputs/digits/checkpoints")

    done = checkpoint("verify", "outputs/digits", cwd=run)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(": whole, 4 files") == 2

    done = checkpoint("show", "outputs/digits", "--step", "2", "--tensors", "true", cwd=run)
    assert done.returncode == 0, done.stderr
    for words in ("step      2\n", "dp_shard 2", "optimizer 153 tensors", "[training]"):
        assert words in done.stdout
    assert "model.embed.patch.weight" in done.stdout


def typed(words, monkeypatch, capsys):
    """What `python -m titan_dit WORDS` prints, run in this process."""
    monkeypatch.setattr(sys, "argv", ["titan_dit", *map(str, words)])
    __main__.main()
    return capsys.readouterr().out


RUN = "outputs/digits"
NEWEST = f"{RUN}/checkpoints/step-00000004"
SPELLINGS = (RUN, f"{RUN}/", f"{RUN}/checkpoints", NEWEST, f"{NEWEST}/manifest.json")


def test_a_run_its_checkpoints_folder_and_a_checkpoint_are_taken_alike(run, monkeypatch, capsys):
    monkeypatch.chdir(run)
    inputs = {"x": torch.zeros(1, 1, 8, 8), "t": torch.zeros(1), "y": torch.zeros(1).long()}
    save_file(inputs, "inputs.safetensors")
    drawn = ("--num", 1, "--steps", 1, "--device", "cpu", "--out")
    commands = (
        (("sample", "--run"), (*drawn, "drawn.safetensors")),
        (("sample", "--checkpoint"), (*drawn, "drawn.png")),
        (("predict", "--checkpoint"), ("--inputs", "inputs.safetensors", "--out", "o.safetensors")),
        (("predict", "--run"), ("--inputs", "inputs.safetensors", "--out", "o.safetensors")),
        (("replay", "--run"), ("--step", 3, "--show", 1)),
        (("checkpoint", "show"), ()),
        (("checkpoint", "list"), ()),
        (("checkpoint", "verify"), ()),
    )
    for first, rest in commands:
        said = {typed((*first, where, *rest), monkeypatch, capsys) for where in SPELLINGS}
        if first[-1] in ("list", "verify"):  # Of a checkpoint: its own line.
            assert {"00002" in text or "   2  " in text for text in said} == {False, True}
            said = {text.splitlines()[-1] for text in said}
        assert len(said) == 1, said
    for i, where in enumerate(SPELLINGS[:-1]):
        words = (
            "convert",
            ("--input", "--from", "--run")[i % 3],
            where,
            ("--out", "--to")[i % 2],
            f"{i}.pt",
        )
        assert f"read    {NEWEST}, step 4" in typed(words, monkeypatch, capsys)
    for command in (("sample", "--run", NEWEST, *drawn, "a.png"), ("checkpoint", "show", NEWEST)):
        with pytest.raises(UserError, match=r"--step 2: .*00004 is one of step 4\. Omit"):
            typed((*command, "--step", 2), monkeypatch, capsys)


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (("sample", RUN), f"a path needs its flag here: sample --run {RUN}."),
        (("predict", RUN), f"a path needs its flag here: predict --run {RUN}."),
        (("convert", RUN), f"a path needs its flag here: convert --input {RUN}."),
        (("data", "pack", "photos"), "a path needs its flag here: data pack --input photos."),
        (("checkpoint", "show", "--run", RUN), f"no flag here: checkpoint show {RUN}."),
        (("checkpoint", "list", f"--run={RUN}"), f"no flag here: checkpoint list {RUN}."),
        (("runs", "--run"), "--run: the path has no flag here: runs."),
        (("data", "show", "--path", "photos"), "no flag here: data show photos."),
        (
            ("convert", "--from", RUN, "--model.hidden_size", 3),
            "`convert` has --input, --out, --format",
        ),
        (
            ("replay", "--run", "outputs", "--step", 3),
            "no config.toml found. It holds runs (digits",
        ),
    ],
)
def test_a_path_with_the_flag_of_another_command_is_told_where(run, words, answer, monkeypatch):
    monkeypatch.chdir(run)
    monkeypatch.setattr(sys, "argv", ["titan_dit", *map(str, words)])
    with pytest.raises(UserError) as caught:
        __main__.main()
    assert answer in str(caught.value)


def test_a_run_is_begun_from_another_by_any_of_the_three_paths(run):
    flags = ("--model.hidden_size", 32, "--training.steps", 4, "--sampling.every", 0)
    flags += ("--metrics.tensorboard", "false", "--job.name", "second", "--checkpoint.resume")
    done = train(*flags, f"{RUN}/checkpoints", cwd=run)
    assert done.returncode == 0, done.stderr
    assert f"resumed from {NEWEST}" in done.stdout
    message = only_error(train(*flags, "outputs", cwd=run))
    assert "[checkpoint] resume outputs: no checkpoint found. It holds runs (digits" in message


def test_what_is_damaged_is_named_with_an_exit_code(run):
    folder = run / "outputs/digits/checkpoints/step-00000004"
    file = folder / "__1_0.distcp"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    done = checkpoint("verify", "outputs/digits", cwd=run)
    assert done.returncode == 1
    assert "step-00000004: damaged: __1_0.distcp" in done.stdout
    assert "step-00000002: whole" in done.stdout
    file.write_bytes(data[:-1])
    assert "damaged: __1_0.distcp" in checkpoint("list", "outputs/digits", cwd=run).stdout


@pytest.mark.parametrize("command", ["list", "verify", "show"])
def test_where_there_is_none_an_error_says_so(run, command):
    assert "no checkpoint found" in only_error(checkpoint(command, "outputs", cwd=run))
