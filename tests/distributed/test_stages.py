"""A run of several stages is killed in each of them and goes on on other ranks: one run."""

import json
from collections import Counter
from dataclasses import replace
from unittest import mock

import pytest
import torch
from harness import on_ranks
from tiny import randomize, state, tiny_config

from titan_dit.checkpoint import run_lock
from titan_dit.config.section import UserError
from titan_dit.data.latents import write_buckets
from titan_dit.ranks.stop_request import Reason
from titan_dit.recovery.ledger import Ledger, trained
from titan_dit.system import run_files
from titan_dit.trainer import Trainer, fit

SIZES = (16, 4)
"""Samples of a step in each stage."""


def write_set(root):
    """Labelled latents of three sizes in one folder."""
    generator = torch.Generator().manual_seed(0)
    buckets = [
        (torch.randn(count, 1, *size, generator=generator), torch.arange(count) % 10)
        for count, size in ((7, (4, 8)), (50, (4, 4)), (30, (8, 8)))
    ]
    write_buckets(root, buckets, num_classes=10, source="a test")


def staged(folder, data, stages=None, resume="auto", **sections):
    """Three steps of the latents of 4x4 of a folder; then five of those of 8x8."""
    later = {
        "steps": 5,
        "model": {"latent_size": 8},
        "data": {"buckets": ["8x8"]},
        "training": {"tokens_per_step": 64, "batch_multiple": 4},
        "optimizer": {"lr": 5e-4},
        "lr_scheduler": {"warmup_steps": 2},
        "objective": {"shift": 2.0},
    }
    return tiny_config(
        job={"dir": str(folder), "name": "staged"},
        model={"latent_size": 4, "num_layers": 2},
        data={"name": "latents", "path": str(data), "buckets": ["4x4"]},
        training={"steps": None, "stages": [{"steps": 3}, later] if stages is None else stages},
        checkpoint={"every": 2, "keep": 0, "resume": resume},
        faults={"log_samples": True},
        **sections,
    )


class Killed(Exception):
    """In place of a kill."""


def train(world, config, killed_before=None):
    """Train until the end, or a kill before a step; return the last trainer and the exit code."""
    take_step, made, trainers = Trainer.train_step, Trainer.__init__, []

    def step(trainer, batch):
        if trainer.step == killed_before:
            trainer.checkpoints.finish()
            raise Killed
        return take_step(trainer, batch)

    def make(trainer, *given):
        made(trainer, *given)
        randomize(trainer.parameters)  # The gates of adaLN-Zero would hide positions.
        trainers[:] = [trainer]

    with (
        mock.patch.object(Trainer, "train_step", step),
        mock.patch.object(Trainer, "__init__", make),
    ):
        try:
            return fit(config, world), trainers[0]
        except Killed:
            return "killed", trainers[0]


def unbroken(world, root):
    """One process from the beginning to the end; then one that is killed in stage 1."""
    write_set(root / "set")
    code, trainer = train(world, staged(root / "whole", root / "set", resume="never"))
    killed, _ = train(world, staged(root / "broken", root / "set"), killed_before=3)
    return code, killed, state(trainer), trainer.objective.config.shift


def broken(world, root):
    """Killed at the boundary and in stage 2, each time on another layout; then to the end."""
    layouts, codes = (({"tp": 2}, 4), ({"pp": 2}, 7), ({}, None)), []
    for parallel, before in layouts:
        microbatches = {"microbatch_size": 2} if "pp" in parallel else {}
        config = staged(root / "broken", root / "set", parallel=parallel)
        config = replace(config, training=replace(config.training, **microbatches))
        code, trainer = train(world, config, before)
        codes.append(code)
    return codes, state(trainer)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("stages")
    return root, on_ranks(1, unbroken, root)[0], on_ranks(2, broken, root)


def rows_of(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return {row["step"]: row for row in map(json.loads, lines)}


def test_a_run_killed_in_each_stage_and_at_the_boundary_is_the_unbroken_one(runs):
    root, (code, killed, whole, shift), ranks = runs
    assert (code, killed, shift) == (0, "killed", 2.0)
    for codes, found in ranks:
        assert codes == ["killed", "killed", 0]
        assert found.keys() == whole.keys()
        for name, value in whole.items():
            if "qkv.bias" in name:  # The gradient of a key's bias is 0 but for rounding.
                continue
            assert torch.allclose(found[name], value, atol=2e-5, rtol=1e-4), name
    expected, found = rows_of(root / "whole"), rows_of(root / "broken")
    assert list(expected) == list(range(1, 9))
    # The first step of a resumed run is not logged.
    assert {1, 2, 5, 6, 8} <= found.keys() <= expected.keys()
    for step, row in found.items():
        assert row["loss"] == pytest.approx(expected[step]["loss"], rel=1e-5)
        assert row["samples"] == expected[step]["samples"]


def test_steps_of_the_learning_rate_count_from_the_begin_of_a_stage(runs):
    root, *_ = runs
    rates = {step: row["lr"] for step, row in rows_of(root / "whole").items()}
    assert rates == pytest.approx(dict(enumerate([1e-3] * 3 + [2.5e-4] + [5e-4] * 4, start=1)))


def test_every_sample_is_counted_once(runs):
    root, *_ = runs
    for run in ("whole", "broken"):
        rows = rows_of(root / run)
        counts = trained(root / run, Ledger())
        assert counts == Counter(range(rows[8]["samples"]))
        assert rows[2]["samples"] == 2 * SIZES[0]
        assert rows[8]["samples"] == 3 * SIZES[0] + 5 * SIZES[1]


def test_the_end_of_a_stage_is_a_checkpoint_with_its_own_sizes(runs):
    root, *_ = runs
    found = {}
    for path in sorted((root / "whole" / "checkpoints").iterdir()):
        record = json.loads((path / "manifest.json").read_text())
        found[record["step"]] = record
    assert list(found) == [2, 3, 4, 6, 8]
    assert [found[step]["config"]["model"]["latent_size"] for step in (3, 4)] == [4, 8]
    assert [found[step].get("stage_cursor") for step in (3, 4, 8)] == [None, 48, 48]
    assert [found[step]["data"]["count"] for step in (3, 4)] == [50, 30]
    text = (root / "whole" / run_files.CONFIG).read_text()
    assert text.count("[[stages]]") == 2
    assert "optimizer.lr = 0.0005" in text


def resumed_with_changes(world, root):
    """What the end of a run says to a config of other stages."""
    small, large = staged(root / "whole", root / "set").training.stages
    changed = {
        "ended": [{"steps": 3, "optimizer": {"lr": 2e-3}}, large],
        "shorter": [{"steps": 2}, large],
        "buckets": [small | {"data": {"buckets": ["8x4"]}}, large],
        "now": [small, large | {"objective": {"shift": 3.0}}],
        "none": [{**large, "steps": 8}],
    }
    return {
        name: refusal(world, staged(root / "whole", root / "set", s)) for name, s in changed.items()
    }


def refusal(world, config):
    try:
        fit(config, world)
    except UserError as error:
        return str(error)
    return None


def refused_at_the_begin(world, root):
    """What a run says before its first step to paths of a later stage that are not there."""
    small, large = staged(root, root / "set").training.stages
    paths = {
        "validation": {"every": 2, "path": str(root / "nowhere")},
        "fid": {"every": 2, "reference": str(root / "nowhere")},
    }
    return [
        refusal(world, staged(root / "refused", root / "set", [small, large | {name: keys}]))
        for name, keys in paths.items()
    ]


def stopped_at_a_boundary(world, root):
    """A stop that is asked for in the last step of stage 1 must not be lost."""
    take_step = Trainer.train_step

    def step(trainer, batch):
        if trainer.step == 3:
            trainer.stop.ask(Reason.STOP)
        return take_step(trainer, batch)

    with mock.patch.object(Trainer, "train_step", step):
        code = fit(staged(root / "stopped", root / "set"), world)
    return code, sorted(path.name for path in (root / "stopped" / "checkpoints").iterdir())


def damaged(world, root):
    """The checkpoints of stage 2 and of its begin are damaged: stage 1 goes on first."""
    config = staged(root / "damaged", root / "set")
    train(world, config, killed_before=5)
    for name in ("step-00000003", "step-00000004"):
        for file in (root / "damaged" / "checkpoints" / name).iterdir():
            if file.name != "manifest.json":
                file.write_bytes(file.read_bytes()[:-1] + b"x")
    code, trainer = train(world, config)
    return code, state(trainer)


def changed_and_stopped(world, root):
    changed, stopped = resumed_with_changes(world, root), stopped_at_a_boundary(world, root)
    return changed, stopped, damaged(world, root), refused_at_the_begin(world, root)


@pytest.fixture(scope="module")
def others(runs):
    # Stages that forget a stop would begin for ever.
    return on_ranks(1, changed_and_stopped, runs[0], timeout=120)[0]


def test_damaged_checkpoints_lead_back_into_an_earlier_stage(runs, others):
    _, (*_, whole, _), _ = runs
    *_, (code, found), _ = others
    assert code == 0
    for name, value in whole.items():
        assert torch.equal(found[name], value), name


def test_changed_stages_are_refused_and_a_stop_at_a_boundary_is_kept(others):
    refused, (code, saved), _, at_the_begin = others
    assert "[[stages]] 1 [optimizer] lr: none -> 0.002" in refused["ended"].replace("None", "none")
    assert '[[stages]] 1 [data] buckets: none -> ["8x4"]' in refused["buckets"].replace(
        "None", "none"
    )
    assert "[[stages]] 1 steps: 3 -> 2, but it has ended" in refused["shorter"]
    assert "[objective] shift: 2.0 -> 3.0" in refused["now"]
    assert "[[stages]] 2 has taken step 8" in refused["none"]
    assert code == 0
    assert saved == ["step-00000002", "step-00000003"]
    for said, key in zip(at_the_begin, ("[validation] path", "[fid] reference"), strict=True):
        assert said.startswith(f"[[stages]] 2: {key}=")
        assert "nowhere" in said


def locks_of_stages(world, root):
    """Whether the run is locked when each of its stages is made, and how often it was locked."""
    write_set(root / "set")
    config = staged(root / "run", root / "set")
    lock, locked, taken = config.job.folder / run_files.LOCK, [], []
    made, take = Trainer.__init__, run_lock.take

    def make(trainer, *given):
        locked.append(lock.exists())
        made(trainer, *given)

    def count(*given):
        taken.append(given)
        take(*given)

    with mock.patch.object(Trainer, "__init__", make), mock.patch.object(run_lock, "take", count):
        assert fit(config, world) == 0
    return locked, len(taken), lock.exists()


def test_a_run_stays_locked_between_its_stages(tmp_path):
    """Else a second launch could take it there."""
    assert on_ranks(1, locks_of_stages, tmp_path) == [([False, True], 1, False)]
