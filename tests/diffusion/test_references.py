"""References and masks in the objective: inputs, dropout, guidance, weights, what is refused."""

from dataclasses import replace

import pytest
import torch
from refusals import refused
from tiny_joint import joint_config

from titan_dit.data.base import Batch
from titan_dit.diffusion.conditions import with_first_frame
from titan_dit.diffusion.drawing import generate
from titan_dit.diffusion.fits import check_data
from titan_dit.diffusion.guidance import Guidance
from titan_dit.diffusion.samplers.ode import euler
from titan_dit.models.layers import patchify
from titan_dit.parallel.init import initialize
from titan_dit.rng import SampleRNG

CPU = torch.device("cpu")
TAKES = {"condition_channels": 2, "reference_tokens": True}
HAS = {"reference": "picture", "masks": True}


def built(network="joint_dit", takes=TAKES, has=HAS, **objective):
    """The objective of a tiny network, and its data."""
    config = joint_config(network, model=takes, data=has, objective=objective)
    source = config.data.open()
    return config.objective.build(config.model, source.facts), source


def batch_of(source, rows):
    fields = source.read(rows)
    numbers = torch.tensor(rows)
    return Batch(fields, numbers, torch.ones(len(rows)), float(len(rows)))


def test_a_reference_is_tokens_of_its_own_and_further_channels_and_is_dropped_by_number():
    objective, source = built(reference_dropout=0.5)
    batch = batch_of(source, list(range(32)))
    prepared = objective.prepare(batch, SampleRNG(1, batch.sample_numbers))
    wanted = patchify(batch.fields["reference"], 2)
    is_kept = prepared.inputs["reference"].flatten(1).abs().sum(1) > 0
    assert 8 < is_kept.sum() < 24
    for name in ("reference", "condition"):
        torch.testing.assert_close(prepared.inputs[name], wanted * is_kept[:, None, None])
    # The same numbers in another batch lose it, too.
    other = batch_of(source, list(range(16, 24)))
    again = objective.prepare(other, SampleRNG(1, other.sample_numbers)).inputs["reference"]
    assert torch.equal(again, prepared.inputs["reference"][16:24])
    # Validation keeps them.
    (first, *_) = objective.evaluations(batch, SampleRNG(1, batch.sample_numbers)).values()
    torch.testing.assert_close(first.inputs["reference"], wanted)


def test_a_mask_weighs_the_tokens_by_the_mean_of_their_pixels_over_that_of_all_masks():
    objective, source = built()
    batch = batch_of(source, [3, 5])
    prepared = objective.prepare(batch, SampleRNG(1, batch.sample_numbers))
    assert prepared.weight.shape == (2, 8)
    mask = batch.fields["mask"].float()
    corner = mask[1, 2:4, 6:8].mean() / source.facts.mask_mean
    assert prepared.weight[1, 7] == pytest.approx(corner.item())
    # The divisor is known beforehand, as without masks.
    assert prepared.total_tokens == 2 * 8
    black = replace(batch, weight=torch.tensor([1.0, 0.0]))
    weight = objective.prepare(black, SampleRNG(1, batch.sample_numbers)).weight
    assert weight[1].sum() == 0
    assert weight[0].equal(prepared.weight[0])


@pytest.mark.parametrize("name", ["mask", "reference"])
def test_a_mask_and_a_reference_of_another_size_are_refused(name):
    objective, source = built()
    fields = source.read([3, 5])
    objective.inspect(fields)
    fields[name] = fields[name][..., :4]
    said = refused(lambda: objective.inspect(fields))
    assert said == f"[data] {name} is of [4, 4], but its latent of [4, 8]. Store both in one size."


def test_a_first_frame_is_marked_as_wan_expects_it():
    latents = torch.randn(2, 3, 4, 2, 2)
    found = with_first_frame(latents, 4)
    assert found.shape == (2, 7, 4, 2, 2)
    assert (found[:, :4, 0] == 1).all()
    assert (found[:, :4, 1:] == 0).all()
    assert found[:, 4:].equal(latents)
    takes = {"condition_channels": 6}
    objective, source = built("wan", takes, {"reference": "first_frame"})
    batch = batch_of(source, [0])
    inputs = objective.prepare(batch, SampleRNG(1, batch.sample_numbers)).inputs
    assert inputs["condition"].shape == (1, 16, 4 * 6)


def test_guidance_keeps_the_reference_on_both_sides_and_samples_depend_on_it():
    objective, source = built()
    seen = []

    def network(inputs, static):
        seen.append(inputs)
        return inputs["tokens"] + inputs["condition"] + inputs["reference"].roll(1, 1)

    batch = batch_of(source, [3, 5])
    given = {**objective.condition.given(batch.fields), **objective.references(batch.fields)}
    drawn = generate(
        network,
        objective,
        given,
        torch.arange(2),
        seed=0,
        sampler=euler,
        steps=2,
        guidance=Guidance(2.0),
    )
    assert drawn.isfinite().all()
    first, second = seen[0]["reference"].chunk(2)
    assert torch.equal(first, second)
    assert not torch.equal(*seen[0]["text"].chunk(2))


def test_new_channels_change_nothing_at_first():
    config = joint_config(model=TAKES, data=HAS)
    with torch.device("meta"):
        network = config.model.build(2)
    initialize(network, network.initializers(), 0, CPU)
    assert (network.embed.condition.weight == 0).all()
    assert network.embed.patch.weight.abs().sum() > 0


REFUSED = {
    "no references": (
        TAKES,
        {},
        "[model] condition_channels=2, but [data] holds no references. Encode NAME.reference.png",
    ),
    "no references, tokens": ({"reference_tokens": True}, {}, "[model] reference_tokens=true, but"),
    "a model without them": (
        {},
        HAS,
        '[data] holds reference pictures of 2 channels, but [model] name="joint_dit" is not given '
        "any. Set condition_channels = 2 or reference_tokens = true, or encode the data without",
    ),
    "other channels": (
        {"condition_channels": 3},
        HAS,
        "[model] condition_channels=3, but [data] holds reference pictures of 2 channels, which "
        "are 2 condition channels. Set condition_channels = 2.",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_data_and_models_that_do_not_fit_are_refused(case):
    takes, has, words = REFUSED[case]
    config = joint_config(model=takes, data=has)
    facts = config.data.open().facts
    assert words in refused(lambda: check_data(facts, config.model, "rectified_flow"))
