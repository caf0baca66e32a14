"""Z-Image pads its pictures with tokens, which have no loss; its time runs to the data."""

import torch
from tiny_joint import Captions, joint_config

from titan_dit.data.base import Batch
from titan_dit.rng import SampleRNG

PADDED, FULL = (2, 6, 12), (2, 8, 16)


def prepared_of(shape, model="z_image", **objective):
    padding = "kept" if model == "flux2" else "removed"
    source = Captions([shape], (32, 12), padding)
    keys = {"latent_size": list(shape[1:]), "text_tokens": 32}
    config = joint_config(model, model=keys, objective=objective)
    built = config.objective.build(config.model, source.facts)
    weight = torch.tensor([1.0, 1.0, 0.0])
    batch = Batch(source.read([0, 1, 2]), torch.arange(3), weight, 7.0)
    return built, batch, built.prepare(batch, SampleRNG(3, batch.sample_numbers))


def test_tokens_behind_the_picture_have_no_loss():
    objective, batch, prepared = prepared_of(PADDED)
    assert (objective.num_real_tokens, objective.model.token_shape[0]) == (18, 32)
    expected = batch.weight[:, None] * (torch.arange(32) < 18)
    assert torch.equal(prepared.weight, expected)
    assert prepared.total_tokens == 7.0 * 18
    # Whatever the network predicts there, the loss is that of the picture.
    predictions = {"prediction": torch.randn(3, 32, 8)}
    losses = objective.loss(predictions, prepared.targets) * prepared.token_weight
    predictions["prediction"][:, 18:] = 1e3
    again = objective.loss(predictions, prepared.targets) * prepared.token_weight
    assert torch.equal(again, losses)
    for each in objective.evaluations(batch, SampleRNG(3, batch.sample_numbers)).values():
        assert torch.equal(each.weight, expected)


def test_a_picture_that_needs_no_padding_has_a_weight_per_sample():
    for prepared in (prepared_of(FULL)[2], prepared_of((8, 2, 4), "flux2")[2]):
        assert prepared.weight.shape == (3,)
        assert prepared.total_tokens == 7.0 * prepared.inputs["tokens"].shape[1]


def test_the_network_sees_the_share_of_data_and_predicts_data_minus_noise():
    objective, batch, prepared = prepared_of(PADDED)
    t = 1 - prepared.inputs["timestep"] / 1000
    clean = objective.model.tokenize(batch.fields["latent"])
    noise = clean - prepared.targets["velocity"]
    expected = torch.lerp(clean, noise, t[:, None, None])
    torch.testing.assert_close(prepared.inputs["tokens"], expected, rtol=1e-5, atol=1e-5)
    assert noise[:, :18].std() > 0.9
    assert not torch.equal(clean[:, :18], noise[:, :18])


def test_a_shift_by_tokens_counts_no_padding():
    objective, _, _ = prepared_of(PADDED, shift_by_tokens="sqrt")
    assert objective.shift == (18 / 256) ** 0.5
