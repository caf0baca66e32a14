"""The trainer from the command line: output, resume after a kill, one clear error for bad input."""

import os
import shutil
import signal
import time

import commands
import pytest
import torch
from commands import metrics, only_error, train, train_command
from running import Running, launcher

from titan_dit.checkpoint.checkpoint import contents, load
from titan_dit.checkpoint.run_checkpoints import find_checkpoint
from titan_dit.data.latents import write_shards
from titan_dit.trained_model import load_trained

SHORT = ("--metrics.every", 1, "--metrics.tensorboard", "false", "--sampling.every", 0)
SMALL = ("--model.hidden_size", 32, "--model.num_layers", 2, "--training.global_batch_size", 16)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """Six steps of a small model on one rank; tests may read it and resume copies of it."""
    cwd = tmp_path_factory.mktemp("finished")
    done = train(*SHORT, *SMALL, "--training.steps", 6, "--checkpoint.every", 3, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return cwd


def test_a_run_leaves_everything_in_its_directory(tmp_path):
    flags = ("--training.steps", 4, "--metrics.every", 2, "--sampling.num", 20)
    flags += ("--sampling.steps", 2, "--checkpoint.every", 2)
    done = train(*SMALL, *flags, cwd=tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr
    # No stderr: a warning that a user cannot fix is noise.
    assert done.stderr == ""
    folder = tmp_path / "outputs" / "digits"
    names = {path.name for path in folder.iterdir()}
    assert names == {
        *("config.toml", "metrics.jsonl", "tensorboard", "checkpoints", "samples", "loss.png")
    }
    assert [row["step"] for row in metrics(folder)] == [1, 2, 4]
    row = metrics(folder)[-1]
    assert row["samples"] == 64
    assert row["samples_per_s"] == pytest.approx(16 / row["step_ms"] * 1e3)
    assert row["tokens_per_s"] == pytest.approx(16 * row["samples_per_s"])
    assert row["mfu"] is None
    assert row["data_wait_ms"] <= row["step_ms"]
    saved = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert saved == ["step-00000002", "step-00000004"]
    assert [p.name for p in (folder / "samples").iterdir()] == ["step-00000004.png"]
    assert any(path.stat().st_size for path in (folder / "tensorboard").iterdir())
    line = next(line for line in done.stdout.splitlines() if line.startswith("step 4/4"))
    for word in ("loss", "grad", "samples/s", "tokens/s", "TFLOP/s", "GiB", "data", "ETA"):
        assert word in line
    assert str(folder.relative_to(tmp_path)) in done.stdout


EXACT = ("--training.steps", 120, "--checkpoint.every", 20, "--training.deterministic", "true")
EXACT += ("--ema.power", 0.05, 0.1, "--ema.snapshots", 7)
EXACT = (*SHORT, *SMALL, *EXACT)
COMMAND = ("-m", "titan_dit.train", "--config", "digits")


def same_run(found, expected):
    for key in ("step", "samples", "loss", "grad_norm", "lr"):
        assert [row[key] for row in metrics(found)] == [row[key] for row in metrics(expected)], key
    for weights in ("model", "ema"):
        same_weights(found, expected, weights)
    same_snapshots(found, expected)


def test_a_run_whose_rank_and_then_launcher_are_killed_ends_as_if_undisturbed(tmp_path):
    (tmp_path / "whole").mkdir()
    done = train(*EXACT, cwd=tmp_path / "whole", ranks=2)
    assert done.returncode == 0, done.stderr
    with Running(launcher(*COMMAND, *EXACT, restarts=1), tmp_path) as run:
        run.wait_for_step(30)
        os.kill(run.children()[-1], signal.SIGKILL)
        run.wait_for("resumed from outputs/digits/checkpoints/step-000000")
        run.wait_until(lambda: run.step >= 65)
    folder = tmp_path / "outputs" / "digits"
    killed_at = metrics(folder)[-1]["step"]
    assert 65 <= killed_at < 120, "the machine was too fast: the run ended before it was killed"
    done = train(*EXACT, cwd=tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr
    assert "resumed from outputs/digits/checkpoints/step-000000" in done.stdout
    same_run(folder, tmp_path / "whole" / "outputs" / "digits")


def same_weights(first, second, weights):
    parts = [
        load_trained(
            find_checkpoint(run, None), weights, None, torch.device("cpu")
        ).network.state_dict()
        for run in (first, second)
    ]
    assert parts[0].keys() == parts[1].keys()
    for name, tensor in parts[0].items():
        assert torch.equal(tensor, parts[1][name]), name


def same_snapshots(first, second):
    """Those taken before the kill, between it and the last checkpoint, and after."""
    runs = []
    for folder in (first, second):
        runs.append({path.name: {} for path in (folder / "checkpoints" / "averages").iterdir()})
        for name, found in runs[-1].items():
            path = folder / "checkpoints" / "averages" / name
            found |= {n: torch.empty(shape) for n, (shape, _) in contents(path).items()}
            load(path, found)
    steps = (18, 35, 52, 69, 86, 103, 120)
    assert sorted(runs[0]) == sorted(runs[1]) == [f"step-{step:08d}" for step in steps]
    for name, found in runs[0].items():
        assert found.keys() == runs[1][name].keys()
        for key, tensor in found.items():
            assert torch.equal(tensor, runs[1][name][key]), (name, key)


def test_a_finished_run_is_not_trained_again(finished_run):
    before = metrics(finished_run / "outputs" / "digits")
    flags = ("--training.steps", 6, "--checkpoint.every", 3)
    done = train(*SHORT, *SMALL, *flags, cwd=finished_run)
    assert done.returncode == 0, done.stderr
    assert "6 of 6" in done.stdout
    assert "nothing left to do: [training] steps=6 are done" in done.stdout
    assert metrics(finished_run / "outputs" / "digits") == before


LAST = "outputs/digits/checkpoints/step-00000006"
BAD_RESUMES = {
    "another model": (("--model.hidden_size", 64), ("[model] hidden_size: 32 -> 64", "do not fit")),
    "another seed": (("--job.seed", 1), ("[job] seed: 0 -> 1", "allow_changes true")),
    "another run's": (
        ("--job.name", "new", "--checkpoint.resume", LAST, "--model.num_layers", 3),
        ("[model] num_layers: 2 -> 3", "do not fit", "train without --checkpoint.resume"),
    ),
    "another batch": (
        ("--training.global_batch_size", 32),
        ("[training] global_batch_size: 16 -> 32",),
    ),
    "never": (("--checkpoint.resume", "never"), ('resume="never"', "up to step 6", "--job.name")),
    "no checkpoint": (
        ("--job.name", "new", "--checkpoint.resume", "outputs"),
        ("[checkpoint] resume outputs: no checkpoint found", "It holds runs (digits): give one"),
    ),
    "another shape, insisting": (
        ("--model.hidden_size", 64, "--checkpoint.allow_changes", "true"),
        ("it is another model's",),
    ),
}


def changes_in(folder):
    """Files and their modification times; folders change with the lock and are left out."""
    return {p: p.is_file() and p.stat().st_mtime_ns for p in folder.rglob("*")}


@pytest.mark.parametrize("case", BAD_RESUMES)
def test_a_resume_that_cannot_be_is_refused_and_nothing_is_overwritten(case, finished_run):
    flags, wanted = BAD_RESUMES[case]
    folder = finished_run / "outputs"
    before = changes_in(folder)
    message = only_error(train(*SHORT, *SMALL, "--training.steps", 9, *flags, cwd=finished_run))
    for words in wanted:
        assert words in message
    assert not ("do not fit" in message and "allow_changes" in message)
    assert changes_in(folder) == before


def test_a_run_on_another_dataset_is_refused(finished_run):
    latents = torch.zeros(40, 1, 8, 8, dtype=torch.float16)
    write_shards(
        finished_run / "other", latents, torch.arange(40) % 10, num_classes=10, source="test"
    )
    flags = ("--training.steps", 9, "--data.name", "latents", "--data.path", "other")
    folder = finished_run / "outputs"
    before = changes_in(folder)
    message = only_error(train(*SHORT, *SMALL, *flags, cwd=finished_run))
    assert "[data]: the contents differ from those the checkpoint was trained on" in message
    assert changes_in(folder) == before


def test_a_damaged_checkpoint_is_passed_over_and_the_run_goes_on(finished_run, tmp_path):
    shutil.copytree(finished_run / "outputs", tmp_path / "outputs")
    folder = tmp_path / "outputs" / "digits" / "checkpoints"
    damaged = folder / "step-00000006"
    data = bytearray((damaged / "__0_0.distcp").read_bytes())
    data[1000] ^= 1
    (damaged / "__0_0.distcp").write_bytes(data)
    flags = ("--training.steps", 6, "--checkpoint.every", 3)
    done = train(*SHORT, *SMALL, *flags, cwd=tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr
    where = "outputs/digits/checkpoints"
    assert f"{where}/step-00000006 is damaged: __0_0.distcp; falling back to" in done.stdout
    assert f"resumed from {where}/step-00000003" in done.stdout
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["step-00000003", "step-00000006", "step-00000006.damaged-1"]


BAD_CONFIGS = {
    "section": (("--training.lr", 3), ("[training] lr: unknown key", "--optimizer.lr")),
    "digits": (("--data.path", "mine"), ("[data] path: unknown key", "add --data.name latents")),
    "key": (("--training.step", 3), ("[training] step", "steps")),
    "value": (("--training.steps", -5), ("[training] steps=-5", "at least 1")),
    "type": (("--model.num_layers", "four"), ('[model] num_layers="four"', "whole number")),
    "heads": (
        ("--model.num_heads", 7),
        ("[model] hidden_size=64", "num_heads=7", "Set num_heads = 8"),
    ),
    "classes": (("--model.num_classes", 7), ("[model] num_classes=7", "10")),
    "size": (
        ("--model.latent_size", 16),
        ("[model] in_channels=1", "[1, 8, 8]", "latent_size = 8"),
    ),
    "sampler": (("--sampling.sampler", "hen"), ("[sampling] sampler", "heun")),
    "dataset": (("--data.name", "digit"), ("[data] name", "digits")),
    "folder": (("--data.name", "latents", "--data.path", "no"), ("[data] path=no", "such folder")),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_bad_input_is_one_clear_error_and_leaves_no_run_directory(case, tmp_path):
    flags, wanted = BAD_CONFIGS[case]
    message = only_error(train(*flags, cwd=tmp_path))
    for words in wanted:
        assert words in message
    assert list(tmp_path.iterdir()) == []


def broken_dataset(folder):
    """Two shards, the second one truncated."""
    latents = torch.zeros(40, 1, 8, 8, dtype=torch.float16)
    labels = torch.arange(40) % 10
    write_shards(folder, latents, labels, num_classes=10, source="test", shard_size=20)
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    return shard


SEVERAL_RANKS = {
    "batch": (("--training.global_batch_size", 129), ("129", "2 data-parallel", "128 or 130")),
    "mesh": (("--parallel.dp_shard", 3), ("dp_shard=3", "2 were started", "dp_shard = 2")),
    "shard": (("--data.name", "latents", "--data.path", "data"), ("00001.safetensors", "bytes")),
}


@pytest.mark.parametrize("case", SEVERAL_RANKS)
def test_several_ranks_print_one_error_and_none_hangs(case, tmp_path):
    flags, wanted = SEVERAL_RANKS[case]
    broken_dataset(tmp_path / "data")
    message = only_error(train(*flags, cwd=tmp_path, ranks=2))
    for words in wanted:
        assert words in message
    assert not (tmp_path / "outputs").exists()


def test_a_rank_that_raises_shows_its_traceback_once_and_stops_the_others(tmp_path):
    (tmp_path / "raising.py").write_text(
        "import os\n"
        "from titan_dit.ranks import failure\nfrom titan_dit import train, trainer\n"
        "original = trainer.Trainer.train_step\n"
        "def train_step(self, batch):\n"
        "    if self.world.rank == 1 and self.step == 3:\n"
        "        raise RuntimeError('planted')\n"
        "    return original(self, batch)\n"
        "trainer.Trainer.train_step = train_step\n"
        "failure.run_and_exit(train.main)\n"
    )
    command = train_command(*SHORT, *SMALL, ranks=2)
    command[command.index("titan_dit.train") - 1 : command.index("titan_dit.train") + 1] = [
        "raising.py"
    ]
    began = time.monotonic()
    done = commands.run(command, tmp_path)
    assert time.monotonic() - began < 30
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert "RuntimeError: planted" in done.stderr
    assert "rank 1 failed" in done.stderr


def test_help_names_every_key_with_its_meaning(tmp_path):
    done = train("--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for words in ("--training.global_batch_size", "Optimizer steps of the whole run", "--data."):
        assert words in done.stdout
