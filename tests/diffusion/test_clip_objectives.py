"""The objective on clips: [c, f, h, w], buckets of frames, and pictures as clips of one frame."""

import pytest
import torch
from refusals import refused
from tiny import built
from tiny_joint import TABLES, Captions

from titan_dit.data.base import Batch
from titan_dit.data.sections import Latents
from titan_dit.diffusion.drawing import generate
from titan_dit.diffusion.fits import sized_models
from titan_dit.diffusion.guidance import Guidance
from titan_dit.diffusion.objective import scale_hint
from titan_dit.diffusion.samplers.ode import euler
from titan_dit.rng import SampleRNG

WAN = {
    "name": "wan",
    "hidden_size": 24,
    "num_layers": 1,
    "num_heads": 2,
    "intermediate_size": 32,
    "in_channels": 2,
    "text_tokens": 20,
    "text_dim": 12,
}
NO_DATA = {**TABLES, "data": {"name": "latents", "path": "set"}}
SHAPES = [(2, 3, 4, 8), (2, 1, 4, 8), (2, 5, 4, 4)]


def config_of(**model):
    own = {"latent_frames": 3, "latent_size": [4, 8]}
    return built({**NO_DATA, "model": WAN | own}, {"model": model})


def objective_of(shapes=SHAPES, **model):
    config, source = config_of(**model), Captions(shapes, (8, 12))
    return config.objective.build(config.model, source.facts), source


def batch_of(source, bucket):
    rows = list(source.bucket_rows[bucket])[:6]
    return Batch(source.read(rows), torch.tensor(rows), torch.ones(6), 24.0)


@pytest.mark.parametrize("bucket", range(3))
def test_a_batch_of_clips_is_prepared_as_by_an_objective_of_its_frames_and_size(bucket):
    whole, source = objective_of()
    batch = batch_of(source, bucket)
    _, frames, height, width = SHAPES[bucket]
    alone, _ = objective_of([SHAPES[bucket]], latent_frames=frames, latent_size=[height, width])
    rng = SampleRNG(3, batch.sample_numbers)
    found, expected = whole.prepare(batch, rng), alone.prepare(batch, rng)
    assert found.inputs["tokens"].shape == (6, frames * height * width // 4, 8)
    assert found.total_tokens == 24 * frames * height * width // 4
    for ours, theirs in ((found.inputs, expected.inputs), (found.static, expected.static)):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for name in ("prediction", "noise", "clean", "velocity"):
        if name in expected.targets:
            assert torch.equal(found.targets[name], expected.targets[name])


def test_tokens_are_of_one_frame_each_in_the_order_of_frames():
    objective, source = objective_of([SHAPES[0]])
    clips = source.read([0, 1])["latent"]
    tokens = objective.clean_tokens({"latent": clips}, SampleRNG(0, torch.arange(2)))
    per_frame = tokens.unflatten(1, (3, -1))
    for frame in range(3):
        alone = config_of(latent_frames=1).model.tokenize(clips[:, :, frame : frame + 1])
        assert torch.equal(per_frame[:, frame], alone)
    assert torch.equal(objective.model.detokenize(tokens), clips)


def test_captions_are_padded_with_zeros_to_the_tokens_of_the_model_and_keep_their_lengths():
    objective, source = objective_of()
    batch = batch_of(source, 0)
    given = objective.evaluations(batch, SampleRNG(0, batch.sample_numbers))
    prepared = next(iter(given.values()))
    text, length = prepared.inputs["text"], prepared.inputs["text_length"]
    assert text.shape == (6, 20, 12)
    assert torch.equal(length, batch.fields["text_length"])
    assert len(length.unique()) > 1
    index = torch.arange(20)
    assert (text[index >= length[:, None]] == 0).all()
    assert torch.equal(text[:, :8], batch.fields["text"])
    # What stands behind a caption's last token does not reach the network.
    network = objective.model.build(2).eval()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    other = torch.where((index < length[:, None])[..., None], text, 7.0)
    with torch.no_grad():
        outputs = [
            network({**prepared.inputs, "text": each}, prepared.side_inputs)[0]
            for each in (text, other)
        ]
    assert torch.equal(*outputs)


def test_a_perfect_network_draws_the_clip_that_it_knows():
    objective, source = objective_of([SHAPES[0]])
    clips = source.read([4, 5])["latent"]
    noise = SampleRNG(0, torch.arange(2)).normal("sample", objective.model.token_shape)
    velocity = noise - objective.model.tokenize(clips)
    drawn = generate(
        lambda inputs, static: velocity,
        objective,
        objective.condition.null(2, torch.device("cpu")),
        torch.arange(2),
        seed=0,
        sampler=euler,
        steps=3,
        guidance=Guidance(1.0),
    )
    torch.testing.assert_close(objective.model.detokenize(drawn), clips, atol=1e-5, rtol=1e-5)


def test_the_hint_of_units_reads_few_large_clips(monkeypatch):
    _, source = objective_of()
    asked = []
    read = source.read
    monkeypatch.setattr(source, "read", lambda rows: asked.append(len(rows)) or read(rows))
    scale_hint(source, source.facts, 2)
    monkeypatch.setattr("titan_dit.diffusion.objective.MOST_HINTED", 2 * 5 * 4 * 4 * 7)
    scale_hint(source, source.facts, 2)
    assert asked == [21, 5]  # The largest bucket, [2, 3, 4, 8], has 192 elements.


@pytest.mark.parametrize(
    ("model", "shapes", "words"),
    [
        (
            {"latent_frames": 2},
            [SHAPES[0]],
            "[model] in_channels=2, latent_frames=2 and latent_size=[4, 8] make samples of "
            "[2, 2, 4, 8], but [data] holds [2, 3, 4, 8]. Set in_channels = 2, latent_frames = 3, "
            "latent_size = [4, 8], or leave the size out",
        ),
        (
            {"in_channels": 4},
            SHAPES,
            "[model] in_channels=4, latent_frames=3 and latent_size=[4, 8] make samples of",
        ),
        (
            {},
            [(2, 4, 8)],
            '[model] name="wan" takes clips, but [data] holds pictures of [2, 4, 8].',
        ),
    ],
)
def test_data_that_do_not_fit_are_refused_with_their_values(model, shapes, words):
    assert words in refused(lambda: objective_of(shapes, **model))


def test_clips_are_refused_by_a_model_of_pictures_by_name():
    config = built(NO_DATA, {})
    facts = Captions(SHAPES, (8, 12)).facts
    words = "takes pictures, but [data] holds clips of [2, 3, 4, 8] (channels, frames, height"
    assert words in refused(lambda: sized_models(config.model, facts))
    assert words in refused(lambda: config.objective.build(config.model, facts))


def test_a_size_of_the_data_fills_in_what_is_not_set(monkeypatch):
    unset = config_of(latent_frames=None, latent_size=None)
    section = Latents(path="set")
    for shape, wanted in (((2, 3, 4, 8), (2, 3, 4, 8)), ((2, 6, 6), (2, 1, 6, 6))):
        monkeypatch.setattr(Latents, "sample_shape", lambda self, shape=shape: shape)
        assert unset.objective.settled_model(unset.model, section).sample_shape == wanted
        half = config_of(latent_frames=7, latent_size=None).model
        assert unset.objective.settled_model(half, section).sample_shape[1] == 7
    whole = config_of().model
    assert unset.objective.settled_model(whole, section) is whole
    assert "latent_frames is not set." in refused(lambda: unset.model.token_shape)
    monkeypatch.setattr(Latents, "sample_shape", lambda self: None)
    assert "[model] latent_size is not set, and cannot be taken from [data]" in refused(
        lambda: unset.objective.settled_model(unset.model, section)
    )
