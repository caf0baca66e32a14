"""Runs on data in buckets: their plans, steps, validation and what is refused."""

from itertools import islice

import pytest
import torch
from refusals import refused
from tiny_joint import joint_config

from titan_dit.data.buckets import BucketOrder
from titan_dit.opening import bucket_lines, plan_buckets, plan_run, small_buckets
from titan_dit.planner import hardware
from titan_dit.planner.candidates import Space
from titan_dit.ranks import process_group
from titan_dit.trainer import Trainer

TWO = {"others": [[4, 4]]}
TRAINING = {"global_batch_size": None, "tokens_per_step": 64}


def config_of(**sections):
    training = TRAINING | sections.pop("training", {})
    return joint_config(data=TWO, training=training, **sections)


@pytest.fixture
def trainer_of(tmp_path):
    job = {"dir": str(tmp_path), "name": "run"}
    with process_group.start("cpu") as world:
        yield lambda **sections: Trainer(config_of(job=job, **sections), world)


def test_each_bucket_has_its_own_sizes_of_steps_and_microbatches(trainer_of):
    trainer = trainer_of(training={"tokens_per_microbatch": 33})
    big, small = trainer.plan.each_bucket
    assert [each.spec.num_tokens for each in (big, small)] == [8, 4]
    assert [each.global_batch_size for each in (big, small)] == [8, 16]
    assert [each.microbatch_size for each in (big, small)] == [4, 8]
    assert [work.samples for work in trainer.work] == [8, 16]
    assert trainer.work[0].flops_per_sample > trainer.work[1].flops_per_sample
    lines = list(trainer.opened.lines(trainer.built, trainer.world.device, 0))
    assert (
        "buckets 2x4x8: 8 latent tokens a sample, 8 samples a step; "
        "2x4x4: 4 latent tokens a sample, 16 samples a step" in lines
    )
    assert "steps   0 of 4 done, 8 to 16 samples each" in lines


def test_steps_see_every_row_of_every_bucket_once_an_epoch(trainer_of):
    trainer = trainer_of(training={"steps": None, "epochs": 1})
    assert trainer.config.training.steps == 32 // 8 + 32 // 16
    batches, rows = trainer.batches(), []
    for trainer.step in range(1, 7):
        batch = next(batches)
        assert batch.total_weight == len(batch.sample_numbers) in (8, 16)
        rows += trainer.sample_order.rows(batch.sample_numbers.tolist())
        trainer.train_step(batch)
    assert sorted(rows) == list(range(64))
    assert trainer.cursor == 64
    assert trainer.meter.steps_of == {0: 4, 1: 2}
    said = refused(lambda: trainer.step_plan(3))
    assert said.startswith("[training] the run goes on at sample 3, which is inside a step of ")


def test_the_validation_loss_is_that_of_all_tokens_and_each_bucket_has_its_own(trainer_of):
    trainer = trainer_of(validation={"every": 1, "samples": 10})
    found = trainer.validate()
    chosen = trainer.validation_set
    total, of_bucket = [0.0, 0], {}
    for bucket, rows in enumerate(trainer.source.bucket_rows):
        places = [place for place, row in enumerate(chosen.rows) if row in rows]
        assert places
        fields = trainer.source.read([chosen.rows[place] for place in places])
        losses = evaluated(trainer, fields, places)
        of_bucket[trainer.source.bucket_names[bucket]] = losses.mean().item()
        total = [total[0] + losses.sum().item(), total[1] + losses.numel()]
    assert found["validation_loss"] == pytest.approx(total[0] / total[1], rel=1e-6)
    for name, loss in of_bucket.items():
        assert found[f"validation_loss_{name}"] == pytest.approx(loss, rel=1e-6)


def evaluated(trainer, fields, places):
    """The losses per token of all evaluations of some places of the validation set."""
    from titan_dit.data.base import Batch
    from titan_dit.rng import SampleRNG

    numbers = torch.tensor(places)
    batch = Batch(fields, numbers, torch.ones(len(places)), float(len(places)))
    rng = SampleRNG(trainer.config.job.seed, numbers)
    every = trainer.objective.evaluations(batch, rng).values()
    return torch.stack([trainer.executor.evaluate(prepared).double() for prepared in every])


@pytest.mark.parametrize(
    ("sections", "line"),
    [
        (
            {"training": {"batch_multiple": 16}},
            "[training] tokens_per_step=64 holds 8 samples (8 tokens each), less than "
            "batch_multiple=16. Set tokens_per_step to at least 128, or batch_multiple to at most "
            "8.",
        ),
        (
            {"training": {"microbatch_size": 3}},
            "[training] tokens_per_step gives 8 samples, which do not divide into "
            "microbatch_size=3 x 1 data-parallel ranks. Set batch_multiple = 3 or a multiple.",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_the_first_step(sections, line, trainer_of):
    said = refused(lambda: trainer_of(**sections))
    assert said.startswith(line)


def test_a_bucket_that_the_layout_does_not_divide_is_named(trainer_of):
    source = trainer_of().source
    config = config_of(parallel={"cp": 8})
    said = refused(lambda: plan_buckets(config, plan_run(config, 8), source))
    assert said.startswith("bucket 2x4x4: [parallel] cp=8 ")
    config = config_of(parallel={"tp": 2}, compile={"enabled": True, "shapes": "dynamic"})
    said = refused(lambda: plan_buckets(config, plan_run(config, 2), source))
    assert 'shapes="dynamic" with [parallel] tp=2: torch cannot compile DTensors' in said


def test_a_dry_run_counts_the_steps_and_flops_of_every_bucket(trainer_of):
    config, work = config_of(), trainer_of().work
    lines = list(bucket_lines(config, plan_run(config, 1)))
    each = [8 * work[0].flops_per_sample, 16 * work[1].flops_per_sample]
    shares = ["66.7%", "33.3%"]  # 32 rows each, in steps of 8 and of 16.
    for line, share, flops in zip(lines, shares, each, strict=False):
        assert f"; {share} of the steps, {flops:.3g} FLOP each" in line
    assert lines[2].endswith(f"a mean step has {(2 * each[0] + each[1]) / 3:.3g} FLOP")
    assert list(bucket_lines(joint_config(), plan_run(joint_config(), 1))) == []


def test_the_planner_takes_microbatches_that_divide_every_bucket():
    config = config_of(training={"tokens_per_step": 96, "batch_multiple": 4})
    space = Space(config, 2, hardware.device_of("h100"))
    assert [each.global_batch_size for each in space.base.each_bucket] == [12, 24]
    assert space.unit == 12
    sizes = {each.microbatch_size for each in space if each.dp_shard == 2}
    assert sizes == {1, 2, 3, 6}
    for candidate in islice(space, 40):
        found = space.config_of(candidate)
        plan_buckets(found, plan_run(found, 2), config.data.open())


def test_a_bucket_smaller_than_a_step_is_named():
    names, batch_sizes = ["2x4x8", "2x4x4"], [8, 16]
    [line] = small_buckets(BucketOrder.of(0, names, [7, 16], batch_sizes))
    assert line.startswith("hint    the bucket 2x4x8 has 7 samples to train on, a step 8: ")
    assert list(small_buckets(BucketOrder.of(0, names, [8, 16], batch_sizes))) == []
