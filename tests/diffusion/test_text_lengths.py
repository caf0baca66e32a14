"""Captions padded to a multiple by bucket: training, drawing and predictions."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from grouped_joint import grouped_config, write_sets
from tiny import randomize

from titan_dit.commands.predict import predict
from titan_dit.data.base import Batch
from titan_dit.diffusion.conditions import rows_of
from titan_dit.diffusion.drawing import generate
from titan_dit.diffusion.guidance import Guidance
from titan_dit.diffusion.samplers.ode import euler
from titan_dit.diffusion.text_lengths import by_text_length
from titan_dit.objectives.base import DataShare
from titan_dit.opening import bucket_lines, open_source, plan_buckets, plan_run
from titan_dit.ranks import process_group
from titan_dit.rng import SampleRNG
from titan_dit.trained_model import LatentNetwork
from titan_dit.trainer import Trainer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grouped")
    write_sets(folder)
    return folder


@pytest.fixture(scope="module")
def opened(folder):
    config = grouped_config(folder)
    source = open_source(config)
    return config, source, config.objective.build(config.model, source.facts)


def batch_of(source, bucket, dropout=None):
    rows = list(source.bucket_rows[bucket])[:4]
    fields = source.read(rows)
    if dropout is not None:
        fields["condition_dropout"] = torch.full((len(rows),), dropout)
    return Batch(fields, torch.tensor(rows), torch.ones(len(rows)), float(len(rows)))


@pytest.mark.parametrize("bucket", range(6))
def test_a_batch_is_prepared_as_by_a_network_of_its_length_alone(bucket, opened):
    config, source, whole = opened
    batch = batch_of(source, bucket, 0.5)
    rng = SampleRNG(3, batch.sample_numbers)
    (_, h, w), tokens = source.shapes[bucket]
    model = replace(config.model, latent_size=(h, w), text_tokens=tokens)
    facts = replace(source.facts, bucket_shapes=(), bucket_text=(), shape=(2, h, w))
    facts = replace(facts, text=replace(facts.text, tokens=tokens))
    alone = config.objective.build(model, facts)
    found, wanted = whole.prepare(batch, rng), alone.prepare(batch, rng)
    assert found.inputs["text"].shape[1] == tokens
    for kind in ("inputs", "targets", "static"):
        ours, theirs = getattr(found, kind), getattr(wanted, kind)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs), kind
    dropped = whole.prepare(batch_of(source, bucket, 1.0), rng).inputs
    assert dropped["text"].shape[1] == tokens
    assert (dropped["text_length"] == 1).all()
    assert (dropped["text"][:, 0] == -1).all()
    each = whole.evaluations(batch, rng)
    assert all(one.inputs["text"].shape[1] == tokens for one in each.values())


def test_plans_reports_and_dry_runs_have_a_bucket_for_each_length(opened):
    config, source, _ = opened
    plan = plan_buckets(config, plan_run(config, 1), source)
    assert [each.bucket for each in plan.buckets] == list(source.bucket_names)
    assert [each.spec.num_text_tokens for each in plan.buckets] == [4, 8, 12, 4, 8, 12]
    # Steps are sized by the picture's tokens: 8 and 4.
    assert [each.global_batch_size for each in plan.buckets] == [4, 4, 4, 8, 8, 8]
    lines = list(bucket_lines(config, plan_run(config, 1)))
    named = [line.split(": ")[0].removeprefix("bucket  ") for line in lines[:-1]]
    assert sorted(named) == sorted(source.bucket_names)
    flops = {line.split(": ")[0]: line.split("steps, ")[1].split()[0] for line in lines[:-1]}
    assert float(flops["bucket  2x4x8, 12 text tokens"]) > float(
        flops["bucket  2x4x8, 4 text tokens"]
    )


@pytest.fixture
def trained(folder, tmp_path):
    job = {"dir": str(tmp_path), "name": "run"}
    sections = {
        "job": job,
        "training": {"steps": None, "epochs": 2},
        "validation": {"every": 2, "samples": 12},
        "sampling": {"every": 2, "num": 10, "steps": 2},
    }
    with process_group.start("cpu") as world:
        trainer = Trainer(grouped_config(folder, **sections), world)
        randomize(trainer.parameters)
        yield trainer


def test_steps_take_rows_of_one_length_and_validation_has_each(trained):
    batches, seen = trained.batches(), set()
    for trained.step in range(1, 9):
        batch = next(batches)
        seen.add(tuple(batch.fields["text"].shape[1:]))
        loss, *_ = trained.train_step(batch)
        assert loss.isfinite()
    assert len(seen) > 1
    found = trained.validate()
    assert {f"validation_loss_2x4x8_{tokens}_text_tokens" for tokens in (4, 8, 12)} <= found.keys()
    names = trained.validation_set.source.bucket_names
    assert len(names) == 6


def test_previews_are_drawn_of_captions_of_lengths_that_no_bucket_has(trained):
    """Only one bucket has been trained on: the executors of the others are made when they come."""
    before = len(trained.executor.by_shapes)
    short = {
        key: value for key, value in trained.executor.by_shapes.items() if ("text", (4, 4)) in key
    }
    kept = len(short)
    assert 0 < kept < before
    trained.executor.by_shapes = short
    trained.preview()
    assert kept < len(trained.executor.by_shapes)


def conditions_of(objective, lengths):
    """Conditions of captions of some lengths, padded to the most, as prompts are."""
    text = torch.zeros(len(lengths), 12, 4)
    draw = torch.Generator().manual_seed(5)
    for row, length in enumerate(lengths):
        text[row, :length] = torch.randn(length, 4, generator=draw)
    return {"text": text, "text_length": torch.tensor(lengths)}


def test_every_prompt_is_drawn_at_its_own_length_and_the_negative_at_its(trained):
    objective, numbers = trained.objective, torch.arange(4)
    given, null = conditions_of(objective, [3, 9, 4, 6]), conditions_of(objective, [1, 5, 1, 2])
    lengths = []

    def forward(inputs, static):
        lengths.append((len(inputs["text"]), inputs["text"].shape[1]))
        assert static["text_positions"].shape[0] == inputs["text"].shape[1]
        return trained.executor.predict(inputs, static)

    def drawn(given, null, numbers):
        return generate(
            forward, objective, given, numbers, seed=1, sampler=euler, steps=2,
            guidance=Guidance(3.0), null=null,
        )  # fmt: skip

    with torch.no_grad():
        whole = drawn(given, null, numbers)
        # Row by row: two rows of 4 and 4 tokens in one pass, others in passes of their own.
        assert set(lengths) == {(4, 4), (1, 12), (1, 8), (1, 4)}
        for row in range(4):
            one = slice(row, row + 1)
            alone = drawn(rows_of(given, one), rows_of(null, one), numbers[one])
            torch.testing.assert_close(alone[0], whole[row], rtol=1e-5, atol=1e-5)
        # A prompt padded further is another picture: its padding is attended to.
        longer = {**given, "text_length": torch.tensor([12, 9, 4, 6])}
        assert (drawn(longer, null, numbers)[0] - whole[0]).abs().max() > 1e-4


def test_ranks_with_other_lengths_make_the_same_runs(opened):
    """Each gathers a sharded network: another number of rows may be another number of passes."""
    _, _, objective = opened
    given, null = conditions_of(objective, [3, 9, 4, 6, 2, 1]), conditions_of(objective, [1] * 6)
    everyone = torch.tensor([[4, 4], [12, 4], [4, 4], [8, 4], [4, 4], [4, 4]])
    runs = []
    for rank in range(3):
        mine = slice(2 * rank, 2 * rank + 2)
        own = [rows_of(each, mine) for each in (given, null)]
        made = []

        def run(rows, conditions, made=made, own=own):
            text, other = conditions
            made.append((len(rows), text["text"].shape[1], other["text"].shape[1]))
            assert (text["text_length"] <= text["text"].shape[1]).all()
            assert torch.equal(text["text"], own[0]["text"][rows][:, : text["text"].shape[1]])
            return {"sum": text["text"].sum((1, 2))}

        share = DataShare(torch.device("cpu"), rank, 3, lambda rows: everyone)
        found = by_text_length(objective.model, own, run, share)["sum"]
        assert torch.equal(found, given["text"][mine].sum((1, 2)))
        runs.append(made)
    assert runs == [[(2, 4, 4), (1, 8, 4), (1, 12, 4)]] * 3


def test_predictions_do_not_depend_on_the_rows_beside_them(trained):
    network = next(iter(trained.executor.by_shapes.values())).model
    latents = LatentNetwork(network, trained.objective)
    given = conditions_of(trained.objective, [3, 6, 4])
    x, t = torch.randn(3, 2, 4, 8), torch.tensor([0.3, 0.7, 0.5])
    inputs = {"x": x, "t": t, "noise": torch.randn(3, 2, 4, 8)}
    run = SimpleNamespace(network=network)
    with torch.no_grad():
        together = latents(x, t, given)
        losses = predict(run, trained.objective, inputs, given)
        for row in range(3):
            one = slice(row, row + 1)
            alone = latents(x[one], t[one], rows_of(given, one))
            torch.testing.assert_close(alone, together[one])
            alone = predict(run, trained.objective, rows_of(inputs, one), rows_of(given, one))
            assert alone.keys() == losses.keys() >= {"out", "loss"}
            for name, value in alone.items():
                torch.testing.assert_close(value, losses[name][one])
        further = latents(
            x[:1], t[:1], {**rows_of(given, slice(1)), "text_length": torch.tensor([6])}
        )
    assert (further - together[:1]).abs().max() > 1e-5  # Its padding is attended to.
