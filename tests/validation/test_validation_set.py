"""[validation]: held-out rows and the loss over them."""

import itertools
import re
import shutil
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from tiny import randomize, state, tiny_config

from titan_dit.commands import replay
from titan_dit.config import config_file
from titan_dit.config.catalog import variant
from titan_dit.config.config_file import build_sections
from titan_dit.config.section import UserError
from titan_dit.config.training import ValidationConfig
from titan_dit.data.base import DataFacts, Source
from titan_dit.data.held_out import held_out_rows
from titan_dit.data.latents import write_shards
from titan_dit.data.loader import load_samples
from titan_dit.data.order import EpochOrder
from titan_dit.observe.metrics import read_rows
from titan_dit.ranks import process_group
from titan_dit.rng import SampleRNG
from titan_dit.trainer import Trainer
from titan_dit.validation import validation_set
from titan_dit.validation.validation_set import digests

BINS = ["t63", "t188", "t313", "t438", "t563", "t688", "t813", "t938"]


@contextmanager
def trainer_of(folder, **sections):
    job = {"dir": str(folder), "name": "run"} | sections.pop("job", {})
    config = tiny_config(job=job, **sections)
    try:
        with process_group.start("cpu") as world:
            yield Trainer(config, world)
    finally:
        if dist.is_initialized():  # Left open by an error that the test expects, and goes on.
            dist.destroy_process_group()


def test_the_held_out_rows_are_in_no_batch_of_any_epoch(tmp_path):
    settings = {"training": {"global_batch_size": 300}, "validation": {"every": 1, "samples": 50}}
    with trainer_of(tmp_path, **settings) as trainer:
        held_out = set(trainer.sample_order.held_out)
        labels = trainer.source.labels[list(trainer.sample_order.held_out)]
        assert torch.bincount(labels).tolist() == [5] * 10
        order = trainer.sample_order
        assert order.num_rows == 1797 - 50
        for epoch in range(2):
            first = epoch * order.num_rows
            rows = order.rows(range(first, first + order.num_rows))
            assert sorted([*rows, *held_out]) == list(range(1797))


def test_the_loss_is_the_mean_over_rows_and_over_fixed_timesteps(tmp_path):
    settings = {"validation": {"every": 1, "samples": 11}, "ema": {"warmup": False}}
    with trainer_of(tmp_path, **settings) as trainer:
        randomize(trainer.parameters)
        found = trainer.validate()
        names = [f"validation_loss_{name}" for name in BINS]
        averages = [f"_ema_{decay}" for decay in (0.9, 0.99)]
        expected = itertools.product(["validation_loss", *names], ["", *averages])
        assert sorted(found) == sorted(name + average for name, average in expected)
        # By hand, in one batch.
        pairs = list(enumerate(trainer.sample_order.held_out))
        objective, cpu = trainer.objective, torch.device("cpu")
        batch = load_samples(trainer.source, pairs, objective.inspect, cpu, len(pairs))
        rng = SampleRNG(0, torch.arange(11))
        clean, noise = objective.clean_tokens(batch.fields, rng), rng.normal("noise", (16, 4))
        model = trainer.executor.model
        for name in BINS:
            timestep = torch.full((11,), float(name[1:]))
            corrupted = objective.corrupt(clean, timestep, noise)
            with torch.no_grad():
                inputs = {**corrupted.inputs, "labels": batch.fields["label"]}
                out = model(inputs, trainer.config.model.static(cpu))
                loss = objective.loss({"prediction": out}, corrupted.targets).mean().item()
            assert found[f"validation_loss_{name}"] == pytest.approx(loss, rel=1e-6)
        mean = sum(found[name] for name in names) / 8
        assert found["validation_loss"] == pytest.approx(mean, rel=1e-12)
        # The averages started at other weights than the current random ones.
        assert found["validation_loss_ema_0.9"] != found["validation_loss"]
        trainer.step = 1
        trainer.train_step(next(trainer.batches()))
        found = trainer.validate()
        assert found["validation_loss_ema_0.9"] != found["validation_loss_ema_0.99"]


def test_validating_changes_nothing_of_the_run(tmp_path):
    ends = []
    for name, every in (("with", 2), ("without", 0)):
        settings = {"training": {"steps": 4}, "validation": {"every": every, "samples": 20}}
        with trainer_of(tmp_path / name, **settings) as trainer:
            trainer.fit()
            ends.append(state(trainer))
    rows = read_rows(tmp_path / "with" / "metrics.jsonl")
    assert [row["step"] for row in rows if "validation_loss" in row] == [2, 4]
    assert "validation_loss" not in read_rows(tmp_path / "without" / "metrics.jsonl")[-1]
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


def replayed_rows(folder, capsys):
    """The dataset rows of the first step."""
    capsys.readouterr()
    replay.main(replay.ReplayFlags(run=str(folder), step=1))
    return sorted(int(row) for row in re.findall(r"row (\d+) ", capsys.readouterr().out))


def test_an_older_run_and_its_replay_hold_out_what_they_held_out(tmp_path, capsys):
    config = tmp_path / "config.toml"
    config.write_text("format = 3\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    settings = {"validation": {"every": 9, "samples": 50}, "training": {"steps": 1}}
    with trainer_of(tmp_path, checkpoint={"every": 1}, **settings) as trainer:
        source = trainer.source
        older, newer = (held_out_rows(source, 0, 50, order) for order in ("sort", "feistel"))
        assert trainer.sample_order.held_out == trainer.validation_set.rows == older != newer
        assert trainer.sample_order.data_order == "sort"
        trainer.validate = dict  # It takes seconds.
        trainer.fit()
    older, newer = (sorted(EpochOrder(0, 1747, rows).rows(range(16))) for rows in (older, newer))
    assert replayed_rows(tmp_path, capsys) == older
    changed = {"job": {"data_order": "feistel"}, "checkpoint": {"allow_changes": True}}
    with (
        pytest.raises(UserError, match="would hold out other rows"),
        trainer_of(tmp_path, **changed, **settings) as trainer,
    ):
        trainer.fit()
    # The checkpoint knows what the step had; the config has what the newest steps have.
    written = config.read_text()
    config.write_text(written.replace('data_order = "sort"', 'data_order = "feistel"'))
    assert replayed_rows(tmp_path, capsys) == older
    shutil.rmtree(tmp_path / "checkpoints")
    assert replayed_rows(tmp_path, capsys) == newer
    keys = [line for line in written.splitlines() if not line.startswith("data_order")]
    config.write_text("\n".join(keys).replace("format = 5", "format = 3"))
    assert replayed_rows(tmp_path, capsys) == older


def test_an_older_run_validates_on_the_rows_of_path_that_it_had(tmp_path):
    dataset(tmp_path / "train", seed=0)
    dataset(tmp_path / "apart", seed=1)
    data = {"name": "latents", "path": str(tmp_path / "train")}
    some = {"every": 1, "path": str(tmp_path / "apart"), "samples": 20}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text("format = 3\n")
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    with trainer_of(tmp_path / "run", data=data, validation=some) as trainer:
        chosen = trainer.validation_set
        older, newer = (held_out_rows(chosen.source, 0, 20, way) for way in ("sort", "feistel"))
        assert chosen.rows == older != newer


def dataset(folder, seed, count=40, shared=()):
    generator = torch.Generator().manual_seed(seed)
    latents = torch.randn(count, 1, 8, 8, generator=generator)
    for row, latent in enumerate(shared):
        latents[3 * row] = latent
    write_shards(folder, latents, torch.arange(count) % 10, num_classes=10, source="noise")
    return latents


def test_another_dataset_is_validated_on_unless_it_shares_samples(tmp_path):
    trained_on = dataset(tmp_path / "train", seed=0)
    dataset(tmp_path / "apart", seed=1)
    # Row 0 equals a training row, label included; row 3 shares only the latent.
    dataset(tmp_path / "overlaps", seed=2, shared=[trained_on[0], trained_on[1]])
    data = {"name": "latents", "path": str(tmp_path / "train")}
    apart = {"every": 1, "path": str(tmp_path / "apart")}
    with trainer_of(tmp_path / "run", data=data, validation=apart) as trainer:
        assert trainer.sample_order.held_out == ()
        assert len(trainer.validation_set.rows) == 40
        assert trainer.validate()["validation_loss"] > 0
    overlaps = apart | {"path": str(tmp_path / "overlaps")}
    said = r"1 of its 40 samples are also in \[data\]"
    with (
        pytest.raises(UserError, match=said),
        trainer_of(tmp_path / "refused", data=data, validation=overlaps),
    ):
        pass
    assert not (tmp_path / "refused").exists()
    # 39 of its 40 rows, drawn by the seed.
    with (
        pytest.raises(UserError, match=r"1 of its 39 samples"),
        trainer_of(tmp_path / "refused", data=data, validation=overlaps | {"samples": 39}),
    ):
        pass


def test_datasets_that_were_compared_are_not_compared_again(tmp_path, monkeypatch):
    dataset(tmp_path / "train", seed=0)
    dataset(tmp_path / "apart", seed=1)
    settings = {
        "data": {"name": "latents", "path": str(tmp_path / "train")},
        "validation": {"every": 4, "path": str(tmp_path / "apart")},
        "checkpoint": {"every": 4},
    }
    with trainer_of(tmp_path / "run", **settings) as trainer:
        trainer.fit()
    monkeypatch.setattr(validation_set, "check_overlap", None)
    with trainer_of(tmp_path / "run", training={"steps": 5}, **settings) as trainer:
        trainer.fit()
    # A truncated file is ignored: the rows are compared again.
    file = tmp_path / "run" / validation_set.COMPARED
    whole = file.read_text()
    file.write_text(whole[:20])
    with pytest.raises(TypeError), trainer_of(tmp_path / "run", **settings):
        pass
    file.write_text(whole)
    # Other rows are compared again.
    more = settings | {"validation": settings["validation"] | {"samples": 7}}
    with pytest.raises(TypeError), trainer_of(tmp_path / "run", **more):
        pass


def test_another_dataset_must_be_of_the_same_kind(tmp_path):
    dataset(tmp_path / "train", seed=0)
    latents, labels = torch.randn(20, 1, 8, 8), torch.arange(20)
    write_shards(tmp_path / "classes", latents, labels, num_classes=20, source="noise")
    write_shards(tmp_path / "half", latents.half(), labels % 10, num_classes=10, source="noise")
    data = {"name": "latents", "path": str(tmp_path / "train")}
    for name, said in (
        ("classes", r"has num_classes=20, but \[data\] has num_classes=10"),
        ("half", r"holds latent float16 \[1, 8, 8\], label int64 \[\], but \[data\] holds latent"),
        ("nowhere", r"\[validation\] path=.*nowhere"),
    ):
        other = {"every": 1, "path": str(tmp_path / name)}
        with (
            pytest.raises(UserError, match=said),
            trainer_of(tmp_path / "run", data=data, validation=other),
        ):
            pass


def test_rows_of_every_dtype_have_digests():
    class Halves(Source):
        facts = DataFacts(count=4)

        def read(self, rows):
            return {
                "x": torch.arange(4, dtype=torch.bfloat16)[rows] // 2,
                "y": torch.zeros(len(rows)),
            }

    found = list(digests(Halves(), [0, 1, 2], ["x", "y"]))
    assert found[0] == found[1] != found[2]


def test_what_cannot_be_validated_on_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"every=5 has nothing to validate on. Set samples"):
        ValidationConfig(every=5).check(has_part=False)
    with (
        pytest.raises(UserError, match=r"samples=1797 holds out all 1797 rows"),
        trainer_of(tmp_path, validation={"every": 1, "samples": 1797}),
    ):
        pass
    with (
        pytest.raises(UserError, match=r'name="?digits"? has no path'),
        trainer_of(tmp_path, validation={"every": 1, "path": "x"}),
    ):
        pass


def test_a_key_of_an_older_format_is_read_under_its_name_of_today(monkeypatch):
    monkeypatch.setitem(config_file.RENAMED, "training.accumulate", "training.microbatch_size")
    assert tiny_config(training={"accumulate": 4}).training.microbatch_size == 4
    written = {"objective": {"name": "ddpm", "schedule": "cosine"}}
    assert build_sections(written, variant)["objective"].noise_schedule == "cosine"
    flags = ["--config", "digits", "--objective.name", "ddpm", "--objective.schedule", "cosine"]
    assert config_file.load(flags, variant).objective.noise_schedule == "cosine"
    with pytest.raises(UserError, match="this titan_dit reads formats up to"):
        config_file.of_record({"config": {}, "config_format": config_file.FORMAT + 1})
