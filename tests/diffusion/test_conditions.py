"""Class labels and captions: what a network is given, and what in its place without it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from refusals import refused
from tiny import tiny_config as small_config
from tiny_joint import joint_config

from titan_dit.config.section import UserError
from titan_dit.data.latent_facts import OF_THE_RUN, LatentFacts
from titan_dit.data.loader import load_samples
from titan_dit.diffusion import drawing, previews
from titan_dit.diffusion.conditions import Captions, ClassLabels, joined, rows_of, without
from titan_dit.diffusion.fits import condition_of, text_example
from titan_dit.diffusion.sections import DDPMConfig, RectifiedFlowConfig
from titan_dit.objectives.base import DataShare
from titan_dit.rng import SampleRNG

CPU = torch.device("cpu")
CONFIG = joint_config()
SOURCE = CONFIG.data.open()
EMPTY = SOURCE.facts.text.null_embedding


def fields_of(numbers):
    rows = [(number, number) for number in numbers]
    return load_samples(SOURCE, rows, lambda fields: None, CPU, float(len(rows)))


def test_labels_are_given_as_they_are_and_their_null_is_negative():
    labels = torch.tensor([3, 0, 7])
    assert torch.equal(ClassLabels().given({"label": labels})["labels"], labels)
    assert ClassLabels().null(2, CPU)["labels"].tolist() == [-1, -1]


def test_captions_are_padded_to_the_tokens_of_the_model():
    captions = Captions(11, EMPTY)
    given = captions.given(fields_of([3, 5]).fields)
    assert given["text"].shape == (2, 11, 12)
    assert given["text_length"].tolist() == [3, 5]
    assert torch.equal(given["text"][1, :5], fields_of([5]).fields["text"][0, :5])
    assert not given["text"][:, 8:].any()


def test_the_null_of_captions_is_the_embedding_of_the_empty_prompt():
    null = Captions(8, EMPTY).null(3, CPU)
    assert null["text_length"].tolist() == [2, 2, 2]
    assert torch.equal(null["text"][2, :2], EMPTY)
    assert EMPTY.abs().sum() > 0
    assert not null["text"][:, 2:].any()


def test_a_dataset_may_have_a_dropout_of_its_own():
    """OF_THE_RUN stands for that of [objective]; 0 drops none, 1 all."""
    batch = fields_of(range(1, 61))
    own = torch.tensor([0.0, 1.0, OF_THE_RUN]).repeat(20)
    objective = CONFIG.objective.build(CONFIG.model, SOURCE.facts)
    rng = SampleRNG(0, batch.sample_numbers)
    plain = objective.prepare(batch, rng).inputs["text_length"]
    fields = {**batch.fields, "condition_dropout": own}
    found = objective.prepare(replace(batch, fields=fields), rng).inputs["text_length"]
    stored = batch.fields["text_length"]
    assert torch.equal(found[0::3], stored[0::3])
    assert (found[1::3] == len(EMPTY)).all()
    assert torch.equal(found[2::3], plain[2::3])
    assert not torch.equal(found[2::3], stored[2::3])


def test_whole_rows_are_dropped_and_joined():
    captions = Captions(8, EMPTY)
    given, null = captions.given(fields_of([3, 5, 7]).fields), captions.null(3, CPU)
    found = without(given, null, torch.tensor([False, True, False]))
    assert found["text_length"].tolist() == [3, 2, 7]
    assert found["text"].dtype == given["text"].dtype
    assert torch.equal(found["text"][1], null["text"][1].to(given["text"]))
    assert torch.equal(found["text"][2], given["text"][2])
    both = joined(given, null)
    assert both["text_length"].tolist() == [3, 5, 7, 2, 2, 2]
    picked = rows_of(both, torch.tensor([4, 0]))
    assert picked["text_length"].tolist() == [2, 3]
    assert torch.equal(picked["text"][1], given["text"][0])


@pytest.mark.parametrize("section", [RectifiedFlowConfig, DDPMConfig])
def test_a_caption_goes_with_its_own_picture_in_any_batch(section):
    objective = section(condition_dropout=0.5).build(CONFIG.model, SOURCE.facts)
    assert objective.takes == ("latent", "text", "text_length")

    def prepared(numbers):
        batch = fields_of(numbers)
        return objective.prepare(batch, SampleRNG(0, batch.sample_numbers)).inputs

    whole, part = prepared(range(16)), prepared([11, 2])
    for name in ("tokens", "timestep", "text", "text_length"):
        assert torch.equal(part[name], whole[name][[11, 2]]), name
    dropped = [
        n for n in range(16) if torch.equal(whole["text"][n, :2].float(), EMPTY.half().float())
    ]
    assert 3 < len(dropped) < 13
    assert all(whole["text_length"][n] == (2 if n in dropped else n % 9) for n in range(16))


def test_guidance_compares_the_prompt_with_the_empty_one():
    objective = RectifiedFlowConfig().build(CONFIG.model, SOURCE.facts)
    asked = []

    def forward(inputs, static):
        asked.append((inputs["text_length"].tolist(), len(inputs["tokens"])))
        return torch.zeros_like(inputs["tokens"])

    given = objective.condition.given(fields_of([3, 5]).fields)
    drawing.generate(
        forward, objective, given, torch.arange(2), seed=0, steps=1,
        sampler=drawing.sampler_of(objective.config, "euler"), guidance=drawing.Guidance(4.0),
    )  # fmt: skip
    assert asked == [([3, 5, 2, 2], 4)]


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (
            {"text": None},
            r"\[model\] takes captions \(text_dim=12\), but the facts of \[data\] have",
        ),
        (
            {"width": 16},
            "embeddings of 16 and up to 8 tokens. Set text_dim = 16 and text_tokens = 8",
        ),
        (
            {"tokens": 9},
            "embeddings of 12 and up to 9 tokens. Set text_dim = 12 and text_tokens = 9",
        ),
    ],
)
def test_captions_that_do_not_fit_the_model_are_refused(facts, words):
    text = SOURCE.facts.text
    changed = facts["text"] if "text" in facts else replace(text, **facts)
    with pytest.raises(UserError, match=words):
        RectifiedFlowConfig().build(CONFIG.model, replace(SOURCE.facts, text=changed))


def test_a_network_that_attends_to_padding_takes_it_as_the_encoder_made_it():
    config = joint_config("flux2")
    facts = config.data.open().facts
    objective = config.objective.build(config.model, facts)
    null = objective.condition.null(2, CPU)
    assert null["text_length"].tolist() == [8, 8]
    assert null["text"].abs().sum(-1).min() > 0
    for changed in ({"padding": "removed"}, {"tokens": 7}):
        text = replace(facts.text, **changed)
        said = refused(lambda text=text: build(config, replace(facts, text=text)))
        assert said.startswith("[model] text_tokens=8 of a network that takes captions with")
        assert f"up to {text.tokens} tokens with padding {text.padding}. Encode them" in said
        assert said.endswith("data encode --text-padding kept --text-tokens 8`.")
    # What no data tell, of an imported network and of a plan, fits.
    build(config, replace(facts, text=text_example(config.model)))


def build(config, facts):
    return config.objective.build(config.model, facts)


def test_a_model_without_a_condition_is_told_what_it_lacks():
    class Bare:
        name = "bare"
        sample_shape, token_shape = (2, 4, 8), (8, 8)
        spec = tokenize = detokenize = static = print

    facts = LatentFacts(shape=(2, 4, 8), count=1, num_classes=1)
    words = r"has neither num_classes nor text_tokens, text_dim\. Add the members of one"
    with pytest.raises(UserError, match=words):
        condition_of(Bare(), facts, "rectified_flow")


def opened(**sampling):
    """The objective, its data opened for previews, and [sampling]."""
    config = joint_config(sampling={"every": 1, "steps": 1, "sampler": "euler", **sampling})
    objective = config.objective.build(CONFIG.model, SOURCE.facts)
    objective.check_preview(config.sampling, config.generation)
    objective.open_drawing(config.sampling, SOURCE, lambda action: action(), Path("none"))
    return objective, config.sampling


def test_a_preview_shows_the_stored_captions_of_ten_rows():
    objective, sampling = opened()
    places, given, names = previews.contents(objective, sampling)
    assert len(names) == 10
    assert len(set(names)) == 10
    assert torch.bincount(places).tolist() == [4] * 10
    rows = [int(name.removeprefix("caption ")) for name in names]
    assert rows[0] == 0
    assert rows[-1] > 50, "spread over all rows"
    for place, text, length in zip(places, given["text"], given["text_length"], strict=True):
        stored = fields_of([rows[place]]).fields
        assert torch.equal(text, stored["text"][0])
        assert length == stored["text_length"][0]


def test_every_data_rank_draws_its_share_with_the_captions_of_its_samples():
    objective, sampling = opened(num=11)
    seen = {}

    def forward(inputs, static):
        seen.setdefault("text", []).append(inputs["text"][: len(inputs["text"]) // 2])
        return torch.zeros_like(inputs["tokens"])

    for rank in range(2):
        share = DataShare(CPU, rank, 2, lambda rows: torch.cat((rows, rows)))
        previews.preview(forward, objective, sampling, 0, share)
    _, given, _ = previews.contents(objective, sampling)
    assert torch.equal(torch.cat(seen["text"])[:11], given["text"])


def test_a_preview_of_data_without_texts_asks_for_prompts(monkeypatch):
    monkeypatch.setattr(type(SOURCE), "captions", lambda self, rows: [])
    with pytest.raises(UserError, match=r"holds none as text\. Set \[sampling\] prompts, a list"):
        opened()


def test_prompts_that_do_not_fit_are_refused_before_training():
    with pytest.raises(UserError, match=r"num=9 does not show all 10 prompts\. Set num to at"):
        opened(num=9)
    with pytest.raises(UserError, match=r"\[sampling\] text_encoder is not set, and the folder"):
        opened(prompts=("a red seven",))
    config = small_config(sampling={"every": 1, "prompts": ("a",)})
    labelled = config.objective.build(config.model, config.data.open().facts)
    with pytest.raises(UserError, match=r"\[sampling\] prompts is for networks that take captions"):
        labelled.check_preview(config.sampling, config.generation)


def test_scores_are_of_the_captions_of_rows_spread_over_the_data():
    objective, _ = opened()
    assert objective.knows_classes({"anything": 1})
    conditions = objective.picture_conditions(16, {"anything": 1})
    given = conditions(torch.tensor([15, 3]))
    stored = fields_of([60, 12]).fields
    assert torch.equal(given["text"], stored["text"])
    assert torch.equal(given["text_length"], stored["text_length"])


def test_a_given_null_replaces_the_empty_prompt():
    objective, _ = opened()
    given, null = (objective.condition.given(fields_of(rows).fields) for rows in ([3, 5], [7, 8]))
    asked = []

    def forward(inputs, static):
        asked.append(inputs["text"])
        return torch.zeros_like(inputs["tokens"])

    drawing.generate(
        forward, objective, given, torch.arange(2), seed=0, steps=1,
        sampler=drawing.sampler_of(objective.config, "euler"), guidance=drawing.Guidance(4.0),
        null=null,
    )  # fmt: skip
    assert torch.equal(asked[0], torch.cat((given["text"], null["text"])))


def test_another_size_changes_tokens_and_shift_and_keeps_the_weights():
    config = joint_config(objective={"shift_by_tokens": "sqrt"})
    objective = config.objective.build(config.model, SOURCE.facts)
    assert objective.static(CPU)["rotary"].shape[0] == 8
    larger = objective.at_size(8, 8)
    assert larger.model.token_shape == (16, 8)
    assert larger.static(CPU)["rotary"].shape[0] == 16
    assert larger.shift == pytest.approx(objective.shift * 2**0.5)
    with torch.device("meta"):
        ours, theirs = (m.spec().build().state_dict() for m in (objective.model, larger.model))
    assert {k: v.shape for k, v in ours.items()} == {k: v.shape for k, v in theirs.items()}
    with pytest.raises(UserError, match="not divisible by patch_size=2"):
        objective.at_size(5, 8)
    labelled = small_config()
    fixed = labelled.objective.build(labelled.model, labelled.data.open().facts)
    with pytest.raises(UserError, match="has no at_size: it draws samples of"):
        fixed.at_size(16, 16)
