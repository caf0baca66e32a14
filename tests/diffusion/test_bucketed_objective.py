"""One objective for latents of several sizes: each batch as by an objective of its size alone."""

import pytest
import torch
from refusals import refused
from tiny_joint import Captions, joint_config

from titan_dit.data.base import Batch
from titan_dit.rng import SampleRNG

SHAPES = [(2, 4, 8), (2, 4, 4), (2, 8, 4)]


def objective_of(shape, shapes=SHAPES, **objective):
    source = Captions(shapes, (8, 12))
    config = joint_config(model={"latent_size": list(shape[1:])}, objective=objective)
    return config.objective.build(config.model, source.facts), source


def batch_of(source, bucket):
    rows = list(source.bucket_rows[bucket])[:6]
    return Batch(source.read(rows), torch.tensor(rows), torch.ones(6), 24.0)


def tensors_of(prepared):
    named = {**prepared.inputs, **prepared.targets, **prepared.static, **prepared.context}
    return named | {"total": torch.tensor(prepared.total_tokens), "weight": prepared.weight}


@pytest.mark.parametrize("more", [{}, {"shift_by_tokens": "sqrt"}])
@pytest.mark.parametrize("bucket", range(3))
def test_a_batch_is_prepared_as_by_an_objective_of_its_size(bucket, more):
    whole, source = objective_of(SHAPES[0], **more)
    batch = batch_of(source, bucket)
    rng = SampleRNG(3, batch.sample_numbers)
    for other in range(3):  # Caches of other sizes are full.
        whole.prepare(batch_of(source, other), rng)
    alone, _ = objective_of(SHAPES[bucket], [SHAPES[bucket]], **more)
    found, expected = whole.prepare(batch, rng), alone.prepare(batch, rng)
    pairs = [(found, expected)]
    evaluated, wanted = whole.evaluations(batch, rng), alone.evaluations(batch, rng)
    pairs += [(evaluated[name], wanted[name]) for name in wanted]
    for one, other in pairs:
        ours, theirs = tensors_of(one), tensors_of(other)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert torch.equal(
        whole.describe(batch.fields, rng)["timestep"], alone.describe(batch.fields, rng)["timestep"]
    )


def test_wide_and_tall_pictures_of_as_many_tokens_have_other_positions():
    whole, source = objective_of(SHAPES[0])
    rng = SampleRNG(3, torch.arange(6))
    wide, tall = (whole.prepare(batch_of(source, bucket), rng) for bucket in (0, 2))
    assert wide.static["rotary"].shape == tall.static["rotary"].shape
    assert not torch.equal(wide.static["rotary"], tall.static["rotary"])


def test_a_fault_without_its_fields_says_nothing_of_a_timestep_that_depends_on_the_size():
    rng = SampleRNG(3, torch.arange(6))
    whole, _ = objective_of(SHAPES[0], shift_by_tokens="exponential")
    assert whole.describe({}, rng) == {}
    whole, _ = objective_of(SHAPES[0])
    assert whole.describe({}, rng).keys() == {"timestep"}


def test_a_batch_of_no_bucket_is_refused():
    whole, _ = objective_of(SHAPES[0])
    said = refused(lambda: whole.sized({"latent": torch.zeros(6, 2, 6, 6)}))
    assert said.startswith("[data] a batch has latents of 6 x 6, which is no bucket's size.")
