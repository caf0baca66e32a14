"""A user's package from the command line: the GPT of examples/, and hooks."""

import json
import random
import re
import shutil
import sys

import pytest
import torch
from commands import ROOT, metrics, only_error, run, train

from titan_dit.checkpoint.run_checkpoints import Checkpoints
from titan_dit.config import catalog, config_file
from titan_dit.config.section import UserError
from titan_dit.dry_run.command import dry_run
from titan_dit.hooks import Hooks, Run

HOOKS = """
import json

from titan_dit.hooks import Hook


class Diary(Hook):
    def write(self, moment, run):
        with open(run.folder / f"diary-{run.rank}", "a") as file:
            keys = sorted(run.row.keys() & {"loss", "validation_loss"})
            file.write(json.dumps([moment, run.step, run.samples, keys]) + "\\n")

    def begun(self, run):
        self.write("begun", run)

    def step_ended(self, run):
        self.write("step_ended", run)

    def validated(self, run):
        self.write("validated", run)

    def saved(self, run):
        self.write("saved", run)

    def ended(self, run):
        self.write("ended", run)


class OnlyFirst(Diary):
    rank0 = True

    def write(self, moment, run):
        assert run.rank == 0
        assert not any(p.requires_grad for p in run.parameters.values())


class Raises(Hook):
    def step_ended(self, run):
        if run.step == 3 and run.rank == run.num_ranks - 1:
            raise ZeroDivisionError("by my own hand")


class Breaks(Hook):
    def __init__(self):
        raise KeyError("HOME")


class Writes(Hook):
    def begun(self, run):
        next(iter(run.parameters.values())).zero_()

    def ended(self, run):
        run.row["loss"] = 0.0


class Leaves(Hook):
    def saved(self, run):
        raise SystemExit(3)


class Half:
    def begun(self, run):
        pass
"""
SMALL = ("--model.hidden_size", 16, "--model.num_layers", 2, "--training.global_batch_size", 8)
SMALL += ("--metrics.tensorboard", "false", "--metrics.every", 1, "--job.dir", "run")


def words():
    """20 kB of text, always the same: which steps are skipped depends on it."""
    draw = random.Random(0)
    chosen = draw.choices(("noise", "latent", "sigma", "velocity", "token", "a", "the"), k=4000)
    return " ".join(chosen)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A user's folder with a package, a config and data; titan_dit is installed elsewhere."""
    folder = tmp_path_factory.mktemp("user")
    shutil.copytree(ROOT / "examples", folder / "mine")
    config = (folder / "mine" / "gpt.toml").read_text().replace("examples.", "mine.")
    assert 'path = "README.md"' in config
    config = config.replace('path = "README.md"', 'path = "words.txt"')
    (folder / "gpt.toml").write_text(config)
    (folder / "mine" / "hooks.py").write_text(HOOKS)
    (folder / "words.txt").write_text(words())
    return folder


@pytest.fixture(scope="module")
def finished(folder):
    """Six steps on two ranks, some of them skipped; validation and checkpoint every three."""
    done = train(
        *SMALL,
        *("--training.steps", 6, "--checkpoint.every", 3),
        *("--validation.every", 3, "--validation.samples", 10),
        *("--faults.spike_ratio", 0.8, "--faults.spike_after", 1),
        *("--job.hooks", "mine.hooks:Diary", "mine.hooks:OnlyFirst", "mine.hook:LossTable"),
        cwd=folder,
        config="gpt.toml",
        ranks=2,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_gpt_trains_validates_and_says_where_it_is_from(finished, folder):
    assert f"mine.gpt:GPTConfig is from {folder / 'mine' / 'gpt.py'}" in finished
    assert f"mine.hook:LossTable is from {folder / 'mine' / 'hook.py'}" in finished
    assert "10 of them for validation" in finished
    rows = metrics(folder / "run")
    assert [row["step"] for row in rows if "validation_loss" in row] == [3, 6]
    assert all("validation_loss_ema_0.95" in rows[step - 1] for step in (3, 6))
    table = (folder / "run" / "losses.csv").read_text().splitlines()
    assert table[0] == "step,samples,loss,validation_loss"
    assert [line.split(",")[0] for line in table[1:]] == ["3", "6"]


def test_hooks_are_called_at_their_moments_on_every_rank(finished, folder):
    diaries = [(folder / "run" / f"diary-{rank}").read_text().splitlines() for rank in (0, 1)]
    assert diaries[0] == diaries[1]
    said = [json.loads(line) for line in diaries[0]]
    moments = [(moment, step) for moment, step, _, _ in said]
    assert moments == [
        ("begun", 0),
        *[("step_ended", 1), ("step_ended", 2)],
        *[("step_ended", 3), ("validated", 3), ("saved", 3)],
        *[("step_ended", 4), ("step_ended", 5)],
        *[("step_ended", 6), ("validated", 6), ("saved", 6), ("ended", 6)],
    ]
    assert said[-1][2] == 48
    assert [keys for moment, _, _, keys in said if moment == "validated"] == [
        ["loss", "validation_loss"]
    ] * 2


def test_a_skipped_step_of_the_gpt_is_replayed_and_the_run_goes_on(finished, folder):
    lines = [
        json.loads(line) for line in (folder / "run" / "faults.jsonl").read_text().splitlines()
    ]
    assert lines
    assert all(line["kind"] == "spike" and line["drawn"] == {} for line in lines)
    step = str(lines[0]["step"])
    replay = [sys.executable, "-m", "titan_dit", "replay", "--run", "run", "--step", step]
    asked = only_error(run(replay, folder))
    assert '--run run: its config has [model] name="mine.gpt:GPTConfig".' in asked
    assert "Look at it, then add --trust (in Python trust=True)." in asked
    done = run([*replay, "--trust"], folder)
    assert done.returncode == 0, done.stderr
    assert "(from faults.jsonl: spike)" in done.stdout
    assert len(re.findall(r"sample \d+  row \d+  first_byte \d+  loss", done.stdout)) == 8
    again = train(*SMALL, "--training.steps", 8, cwd=folder, config="run/config.toml")
    assert again.returncode == 0, again.stderr
    assert "resumed from run/checkpoints/step-00000006" in again.stdout
    assert [row["step"] for row in metrics(folder / "run")] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_rows_once_held_out_stay_held_out(finished, folder):
    done = train(
        *SMALL, "--validation.samples", 12, "--training.steps", 9, cwd=folder,
        config="run/config.toml",
    )  # fmt: skip
    assert "[validation] samples (held-out rows of [data]): 10 -> 12" in only_error(done)


def test_the_gpt_is_rehearsed_on_ranks_that_are_not_there(folder):
    flags = (*SMALL, "--dry-run", 4, "--parallel.tp", 2, "--parallel.pp", 2)
    done = train(*flags, cwd=folder, config="gpt.toml")
    assert done.returncode == 0, done.stderr
    assert re.search(r"model   mine\.gpt:GPTConfig: [\d,]+ parameters, 64 tokens", done.stdout)
    assert "a device needs" in done.stdout


def test_a_hook_that_raises_is_named_and_the_run_ends_in_good_order(folder):
    done = train(
        *SMALL,
        *("--training.steps", 20, "--checkpoint.every", 10, "--validation.every", 0),
        *("--job.hooks", "mine.hooks:Raises", "--job.dir", "raised"),
        cwd=folder,
        config="gpt.toml",
        ranks=2,
    )
    error = only_error(done)
    assert (
        '[job] hooks="mine.hooks:Raises": step_ended raised at step 3 on rank 1: '
        "ZeroDivisionError: by my own hand" in error
    )
    # All ranks stopped after the same step and saved.
    (saved,) = Checkpoints(folder / "raised" / "checkpoints").folders()
    assert saved.name in ("step-00000003", "step-00000004")


REFUSED = [
    (("--model.name", "mine.gpt:GTPConfig"), "Did you mean GPTConfig?"),
    (("--model.name", "mine.gtp:GPTConfig"), "there is no module mine.gtp, neither installed nor"),
    (("--model.name", "mine.gpt:Windows"), "Windows in .*gpt.py has no spec \\(the ModelSpec"),
    (("--data.name", "digits"), "has the fields latent, label, but \\[objective\\] takes text"),
    (("--objective.name", "ddpm"), 'GPTConfig" has no sample_shape'),
    (("--sampling.every", "5"), "has no preview. Set every = 0"),
    (("--parallel.tp", "2", "--parallel.tensor_plan", "auto"), "has no tensor plan"),
]


@pytest.mark.parametrize(("flags", "said"), REFUSED)
def test_what_does_not_fit_is_refused_in_one_line(flags, said, folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(UserError, match=said):
        dry_run(config_file.load(["--config", "gpt.toml", *flags], catalog.variant), None)


def test_a_hook_without_all_its_methods_is_refused(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(UserError, match="with the methods ended, saved, step_ended, validated"):
        Hooks(("mine.hooks:Half",), is_first=True)


def test_a_hook_that_breaks_writes_or_leaves_is_a_failure_that_says_so(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert Hooks(("mine.hooks:Breaks",), is_first=True).failure == (
        "[job] hooks=\"mine.hooks:Breaks\": building it raised KeyError: 'HOME'"
    )
    weight = torch.ones(2, requires_grad=True)
    run = Run("run", folder, 5, 0, 1, {"job": {}}, {"weight": weight.detach()})
    said = {
        ("Writes", "begun"): "begun changed a parameter at step 1 on rank 0. Hooks are read-only.",
        ("Writes", "ended"): "ended raised at step 1 on rank 0: TypeError",
        ("Leaves", "saved"): "saved raised at step 1 on rank 0: SystemExit: 3",
        ("Diary", "begun"): None,
    }
    for (name, moment), failure in said.items():
        hooks = Hooks((f"mine.hooks:{name}",), is_first=True)
        hooks.show(run)
        (folder / "run").mkdir(exist_ok=True)
        hooks.call(moment, 1, 8, {"loss": 1.0})
        assert (hooks.failure or "").endswith(failure or "") or failure in hooks.failure
        assert bool(hooks.failure) == bool(failure)
