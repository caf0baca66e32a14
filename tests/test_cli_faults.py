"""Skipped steps, faults.jsonl, replay and changing ranks, by command line."""

import json
import re
import shutil
import struct
import sys
import tempfile
from collections import Counter
from pathlib import Path

import commands
import pytest
import torch
from commands import metrics, train, train_command
from running import Running

from titan_dit.checkpoint.record import read_record
from titan_dit.checkpoint.run_checkpoints import Checkpoints
from titan_dit.commands import replay as replay_command
from titan_dit.config.section import UserError
from titan_dit.data.latents import write_shards
from titan_dit.data.order import EpochOrder
from titan_dit.recovery.ledger import Ledger, logged_samples, trained

SMALL = ("--model.hidden_size", 32, "--model.num_layers", 2, "--sampling.every", 0)
SMALL += ("--metrics.tensorboard", "false", "--job.name", "run")
ROWS, SPOILED = 48, 13


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory):
    """A packed dataset with one value overwritten with NaN."""
    folder = tmp_path_factory.mktemp("spoiled") / "data"
    torch.manual_seed(0)
    latents, labels = torch.randn(ROWS, 1, 8, 8), torch.arange(ROWS) % 10
    write_shards(folder, latents, labels, num_classes=10, source="noise")
    (file,) = folder.glob("*.safetensors")
    raw = bytearray(file.read_bytes())
    begin = 8 + struct.unpack("<Q", raw[:8])[0]
    offset = json.loads(raw[8:begin])["latent"]["data_offsets"][0]
    place = begin + offset + 4 * (64 * SPOILED + 7)
    raw[place : place + 4] = struct.pack("<f", float("nan"))
    file.write_bytes(raw)
    return folder


def replay(cwd, *flags):
    return commands.run([sys.executable, "-m", "titan_dit", "replay", *map(str, flags)], cwd)


def test_a_spoiled_sample_is_skipped_on_all_ranks_recorded_and_found_by_replay(spoiled, tmp_path):
    flags = ("--data.name", "latents", "--data.path", spoiled, "--training.global_batch_size", 8)
    flags += ("--training.steps", 6, "--checkpoint.every", 2, "--metrics.every", 3)
    done = train(*SMALL, *flags, cwd=tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "outputs" / "run"

    (number,) = [n for n in range(ROWS) if EpochOrder(0, ROWS).rows([n]) == [SPOILED]]
    step, first = number // 8 + 1, number // 8 * 8
    (line,) = [json.loads(line) for line in (run / "faults.jsonl").read_text().splitlines()]
    assert (line["step"], line["kind"]) == (step, "nonfinite")
    assert line["sample_numbers"] == [[first, first + 8]]
    assert line["rows"][number - first] == SPOILED
    assert f"step {step} skipped: the gradient norm is not finite" in done.stdout
    assert [row["skipped_steps"] for row in metrics(run)] == [int(s >= step) for s in (1, 3, 6)]
    record = read_record(Checkpoints(run / "checkpoints").newest())
    assert record["ledger"]["untrained"] == [[first, first + 8, step, step]]
    assert record["ledger"]["trained"] == 40

    done = replay(tmp_path, "--run", run, "--step", step, "--microbatch-size", 3)
    assert done.returncode == 0, done.stderr
    assert f"samples {first}-{first + 7} (from faults.jsonl: nonfinite)" in done.stdout
    said = done.stdout.splitlines()
    faulty = said.index("1 of 8 samples are at fault:")
    t = line["drawn"]["timestep"][number - first]
    assert re.fullmatch(
        rf"  sample {number}  row {SPOILED}  label {SPOILED % 10}  timestep {t:.4g}  loss nan  "
        rf"microbatch {(number - first) // 3}  not finite: latent, input tokens, prediction, loss",
        said[faulty + 1],
    )
    norms = re.findall(r"microbatch (\d): \d samples, gradient norm (\S+)", done.stdout)
    assert [norm == "nan" for _, norm in norms] == [i == (number - first) // 3 for i in range(3)]
    older = (step - 1) % 2
    whose = f"checkpoints/step-{step - 1 - older:08d}" if step > 2 else "as initialized"
    assert whose in done.stdout
    assert ("1 steps older" if older else "those of the step") in done.stdout


def test_an_overflow_of_fp16_is_replayed_at_the_scale_of_its_step(tmp_path):
    flags = ("--training.global_batch_size", 8, "--training.steps", 2, "--checkpoint.every", 0)
    flags += ("--precision.dtype", "fp16", "--precision.loss_scale_init", 2.0**32)
    done = train(*SMALL, *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "outputs" / "run"
    words = "step 1 skipped: the gradients overflow in fp16 at the loss scale 4.29497e+09"
    assert words in done.stdout
    done = replay(tmp_path, "--run", run, "--step", 1)
    assert done.returncode == 0, done.stderr
    assert "(from faults.jsonl: overflow)" in done.stdout
    assert "loss scale 4.29497e+09" in done.stdout
    assert re.search(r"gradient norm (nan|inf)", done.stdout)
    assert "0 of 8 samples are at fault" in done.stdout
    assert "Only a gradient overflows" in done.stdout


def test_replay_of_a_good_step_gives_the_loss_of_its_metrics(finished, tmp_path):
    """One process repeats the step of three ranks, from the batch plan."""
    row = metrics(finished)[20]
    done = replay(finished.parent.parent, "--run", finished, "--step", 21, "--show", 16)
    assert done.returncode == 0, done.stderr
    assert "those of the step" in done.stdout
    assert "(from the plan of batches)" in done.stdout
    losses = [float(loss) for loss in re.findall(r"  loss (\S+)", done.stdout)]
    assert sum(losses) / 16 == pytest.approx(row["loss"], rel=1e-4)
    (norm,) = re.findall(r"gradient norm (\S+)", done.stdout)
    assert float(norm) == pytest.approx(row["grad_norm"], rel=1e-4)
    bad = replay(finished.parent.parent, "--run", finished, "--step", 21, "--microbatch", 5)
    assert bad.returncode == 2
    assert "--microbatch 5: 16 samples are 1 microbatches of 32" in bad.stderr


def test_replay_begins_at_the_weights_at_which_the_run_did(finished, tmp_path, capsys):
    """Those of [checkpoint] init or of another run; frozen parameters have no gradients."""
    base, end = finished / "checkpoints" / "step-00000060", ("--checkpoint.every", 0)
    begun = {
        1: ("--checkpoint.init", base, "--training.frozen", "embed.*", "--training.steps", 1),
        61: ("--checkpoint.resume", base, "--training.steps", 61),
    }
    for step, flags in begun.items():
        cwd = tmp_path / str(step)
        cwd.mkdir()
        done = train(*SMALL, *LONG, *flags, *end, cwd=cwd)
        assert done.returncode == 0, done.stderr
        run = cwd / "outputs" / "run"
        replay_command.main(
            replay_command.ReplayFlags(run=str(run), step=step, show=0, device="cpu")
        )
        said = capsys.readouterr().out
        assert "those of the step" in said
        (norm,) = re.findall(r"gradient norm (\S+)", said)
        assert float(norm) == pytest.approx(metrics(run)[-1]["grad_norm"], rel=1e-4)
    with pytest.raises(
        UserError, match=r"--step 9: .* went on from .*step-00000060, after step 60"
    ):
        replay_command.main(replay_command.ReplayFlags(run=str(run), step=9, device="cpu"))


def test_a_step_that_was_never_taken_is_not_replayed_but_for_one_that_a_run_died_in(
    finished, tmp_path
):
    with pytest.raises(UserError, match=r"--step 61: .*outputs/run has taken steps 1 to 60\.$"):
        replay_command.main(replay_command.ReplayFlags(run=str(finished), step=61))

    def newest(rows=(), saved=(), faults=()):
        """Newest step of a run with these files; its last metrics line is truncated."""
        run = Path(tempfile.mkdtemp(dir=tmp_path))
        lines = [json.dumps({"step": step}) for step in rows]
        (run / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 9']))
        (run / "faults.jsonl").write_text("".join(json.dumps(line) + "\n" for line in faults))
        for step in saved:
            (run / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
            (run / "checkpoints" / f"step-{step:08d}" / "manifest.json").touch()
        (run / "checkpoints" / "step-00000099.set-aside-1").mkdir(parents=True)
        return replay_command.newest_step(run)

    bad, back = {"step": 14, "kind": "spike"}, {"step": 14, "kind": "rollback", "to_step": 6}
    assert newest() == 0
    assert newest(rows=(1, 10), saved=(4, 8)) == 10
    assert newest(rows=(1, 10), saved=(8, 12)) == 12
    assert newest(rows=(1, 10), saved=(8,), faults=[bad]) == 14
    # Undone steps count only if repeated.
    assert newest(rows=(1,), saved=(6,), faults=[bad, back]) == 6
    assert newest(rows=(1,), saved=(6,), faults=[bad, back, bad]) == 14
    died = tmp_path / "died"
    died.mkdir()
    (died / "metrics.jsonl").write_text('{"step": 3}\n')
    shown = [replay_command.check_taken(died, step, every=3, steps=9) for step in (3, 4, 6)]
    assert shown == [True, False, False]
    with pytest.raises(UserError, match="steps 1 to 3, and cannot have started any after step 6"):
        replay_command.check_taken(died, 7, every=3, steps=9)
    empty = tmp_path / "empty"
    assert not replay_command.check_taken(empty, 1, every=0, steps=9)
    with pytest.raises(UserError, match="no step, and cannot have started any after step 1"):
        replay_command.check_taken(empty, 2, every=0, steps=9)
    log = died / "samples-seen" / "attempt-00001"
    log.mkdir(parents=True)
    (log / "rank-00000.jsonl").write_text('{"step": 5, "ranks": 1, "numbers": [[0, 8]]}\n')
    assert replay_command.check_taken(died, 5, every=0, steps=9)


LONG = ("--training.steps", 60, "--training.global_batch_size", 16, "--metrics.every", 1)
LONG += ("--checkpoint.every", 4, "--checkpoint.keep", 0, "--faults.log_samples", "true")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The reference run, on one rank."""
    cwd = tmp_path_factory.mktemp("whole")
    done = train(*SMALL, *LONG, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return cwd / "outputs" / "run"


def kill_after(cwd, step, ranks, *flags):
    """Train on `ranks` ranks until `step`, then kill them all."""
    with Running(train_command(*SMALL, *LONG, *flags, ranks=ranks), cwd) as run:
        run.wait_for_step(step)


def test_a_run_on_4_then_2_then_3_ranks_sees_the_samples_of_the_uninterrupted_one(
    finished, tmp_path
):
    kill_after(tmp_path, 10, 4, "--parallel.dp_shard", 2, "--parallel.dp_replicate", 2)
    kill_after(tmp_path, 38, 2, "--parallel.dp_shard", 2, "--parallel.dp_replicate", 2)
    flags = ("--parallel.dp_shard", 2, "--parallel.dp_replicate", 2)
    done = train(*SMALL, *LONG, *flags, cwd=tmp_path, ranks=3)
    assert done.returncode == 0, done.stderr
    assert "[parallel] dp_replicate follows the ranks: 2 -> 1" in done.stdout
    assert "[parallel] dp_shard follows the ranks: 2 -> 3" in done.stdout
    run = tmp_path / "outputs" / "run"
    ledger = Ledger.of(read_record(Checkpoints(run / "checkpoints").newest()))
    assert trained(run, ledger) == trained(finished, Ledger()) == Counter(range(60 * 16))
    # Equal at every step, for all three world sizes.
    assert logged_samples(run) == logged_samples(finished)
    attempts = sorted((run / "samples-seen").iterdir())
    assert [len(list(attempt.iterdir())) for attempt in attempts] == [4, 2, 3]
    rows, expected = metrics(run), metrics(finished)
    assert [row["step"] for row in rows] == list(range(1, 61))
    losses, wanted = ([row["loss"] for row in part] for part in (rows, expected))
    assert losses == pytest.approx(wanted, rel=1e-5)


def test_ranks_that_a_run_cannot_go_on_with_are_refused_and_nothing_is_overwritten(finished):
    """The error comes before the rendezvous, so one rank shows it."""
    cwd = finished.parent.parent
    before = {path: path.stat().st_mtime_ns for path in cwd.rglob("*")}
    for ranks, flags, words in (
        (
            3,
            ("--parallel.tp", 2),
            "tp=2 = 2 ranks per model replica, which does not divide the 3",
        ),
        (17, (), "global_batch_size=16 is less than the 17 data-parallel ranks"),
        (1, ("--job.name", "new", "--parallel.dp_shard", 2), "dp_shard=2 = 2 ranks, but 1 was"),
    ):
        command = train_command(*SMALL, *LONG, *flags)
        done = commands.run(command, cwd, WORLD_SIZE=ranks)
        assert done.returncode == 2, done.stdout + done.stderr
        assert words in done.stderr
    assert {path: path.stat().st_mtime_ns for path in cwd.rglob("*")} == before


@pytest.mark.parametrize("keys", ["", "objective = true", "objective = false"])
def test_replay_compiles_prepare_where_the_run_did(keys, finished, tmp_path, monkeypatch, capsys):
    """A config of before the key `objective` means that nothing but the blocks was compiled."""
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    for step in range(24, 61, 4):  # The next checkpoint would tell how the step was compiled.
        shutil.rmtree(run / "checkpoints" / f"step-{step:08d}")
    written = (run / "config.toml").read_text()
    table = f"[compile]\nenabled = true\n{keys}\n\n"
    (run / "config.toml").write_text(re.sub(r"\[compile\].*?\n\n", table, written, flags=re.S))
    compiled = []

    def double(function, **_):
        def call(*arguments):
            compiled.append(function.__name__)
            return function(*arguments)

        return call

    monkeypatch.setattr(replay_command.compile, "check", lambda *_: None)
    monkeypatch.setattr(torch, "compile", double)
    replay_command.main(replay_command.ReplayFlags(run=str(run), step=21, show=16, device="cpu"))
    assert compiled == (["prepare"] if "true" in keys else [])
    losses = [float(loss) for loss in re.findall(r"  loss (\S+)", capsys.readouterr().out)]
    assert sum(losses) / 16 == pytest.approx(metrics(run)[20]["loss"], rel=1e-4)
