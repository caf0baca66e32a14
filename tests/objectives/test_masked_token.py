"""Masked tokens: how many, which, by what they are replaced; spans in order; the loss."""

import dataclasses

import pytest
import torch

from titan_dit.config.section import UserError
from titan_dit.data.base import Batch
from titan_dit.data.latent_facts import LatentFacts
from titan_dit.data.sentence_pairs import PairFacts
from titan_dit.data.token_windows import TokenFacts
from titan_dit.models.bert_config import BERTConfig
from titan_dit.models.dit_config import DiTConfig
from titan_dit.objectives.masked_token import pairs_of
from titan_dit.objectives.sections import MaskedTokenConfig
from titan_dit.rng import SampleRNG

N, VOCABULARY, END = 64, 1000, 7
CLS, SEP, MASK = 1, 2, 3
MODEL = BERTConfig(
    hidden_size=32, num_layers=2, num_heads=4, vocab_size=VOCABULARY, sequence_length=N
)
WINDOWS = TokenFacts(count=1, sequence_length=N, vocabulary=VOCABULARY - 1, end_of_document=END)
PAIRS = PairFacts(count=1, sequence_length=N, vocabulary=VOCABULARY, cls=CLS, sep=SEP, mask=MASK)


def windows(num, first=0):
    """A batch of windows of random ids."""
    generator = torch.Generator().manual_seed(first)
    tokens = torch.randint(VOCABULARY - 1, (num, N + 1), generator=generator)
    return batch_of({"tokens": tokens}, first)


def sentences(num):
    """A batch of samples of two to nine sentences of six tokens; ids tell place and sample."""
    size = N - 3
    count = (torch.arange(num) % 8 + 2)[:, None] * 6
    place = torch.arange(size).expand(num, -1)
    tokens = (100 + place).where(place < count, 0)
    numbers = (place // 6).where(place < count, -1)
    return batch_of({"tokens": tokens, "sentences": numbers}, 0)


def batch_of(fields, first):
    num = len(fields["tokens"])
    return Batch(fields, torch.arange(first, first + num), torch.ones(num), float(num))


def rng_of(batch, seed=0):
    return SampleRNG(seed, batch.sample_numbers)


def prepared_of(facts, batch, **keys):
    keys.setdefault("sentence_order", isinstance(facts, PairFacts))
    objective = MaskedTokenConfig(**keys).build(MODEL, facts)
    return objective, objective.prepare(batch, rng_of(batch))


def test_every_window_has_round_of_share_times_n_masked_tokens():
    _, prepared = prepared_of(WINDOWS, windows(32))
    assert ((prepared.context["labels"] >= 0).sum(1) == round(0.15 * N)).all()


def test_a_padded_sample_has_the_share_of_its_own_tokens_masked():
    _, prepared = prepared_of(PAIRS, sentences(32))
    expected = [round(0.15 * length) for length in prepared.context["lengths"].tolist()]
    assert (prepared.context["labels"] >= 0).sum(1).tolist() == expected


def test_a_sample_has_a_masked_token_however_small_its_share():
    _, prepared = prepared_of(PAIRS, sentences(32), mask_share=0.005)
    assert ((prepared.context["labels"] >= 0).sum(1) == 1).all()


def test_special_tokens_and_padding_are_never_masked():
    batch = windows(64)
    batch.fields["tokens"][:, ::2] = END
    _, prepared = prepared_of(WINDOWS, batch)
    assert not (prepared.context["labels"] == END).any()
    kept = batch.fields["tokens"][:, 1:] == END
    assert (prepared.inputs["tokens"][kept] == END).all()
    _, prepared = prepared_of(PAIRS, sentences(64))
    labels = prepared.context["labels"]
    assert (labels[labels >= 0] >= 100).all()


def test_a_sample_of_special_tokens_alone_has_no_loss():
    batch = windows(2)
    batch.fields["tokens"][1] = END
    objective, prepared = prepared_of(WINDOWS, batch)
    loss = objective.loss({"losses": torch.ones(2, N)}, prepared.targets)
    assert loss.sum(1).tolist() == pytest.approx([N, 0])


def test_masked_tokens_are_replaced_80_10_10():
    batch = windows(2000)
    _, prepared = prepared_of(WINDOWS, batch)
    labels, inputs = prepared.context["labels"], prepared.inputs["tokens"]
    is_masked = labels >= 0
    found, true = inputs[is_masked], labels[is_masked]
    shares = [(found == VOCABULARY - 1), (found == true)]
    assert [round(share.float().mean().item(), 2) for share in shares] == [0.8, 0.1]
    assert torch.equal(inputs[~is_masked], batch.fields["tokens"][:, 1:][~is_masked])
    other = found[(found != true) & (found != VOCABULARY - 1)]
    assert other.min() < 20
    assert other.max() > VOCABULARY - 20


def test_draws_depend_on_the_sample_number_alone():
    batch = windows(8)
    objective, whole = prepared_of(WINDOWS, batch)
    part = Batch(
        {"tokens": batch.fields["tokens"][[5, 2]]}, torch.tensor([5, 2]), torch.ones(2), 8.0
    )
    alone = objective.prepare(part, rng_of(part))
    assert torch.equal(alone.inputs["tokens"], whole.inputs["tokens"][[5, 2]])
    assert torch.equal(alone.context["labels"], whole.context["labels"][[5, 2]])
    later = Batch(batch.fields, batch.sample_numbers + 100, torch.ones(8), 8.0)
    other = objective.prepare(later, rng_of(later))
    assert not torch.equal(other.context["labels"], whole.context["labels"])


def test_the_loss_is_the_mean_over_masked_tokens_plus_the_mean_over_samples():
    objective, prepared = prepared_of(PAIRS, sentences(16))
    is_masked = prepared.context["labels"] >= 0
    losses = torch.rand(16, N) * is_masked
    order = torch.rand(16)
    losses[:, 0] = order
    per_token = objective.loss({"losses": losses}, prepared.targets)
    total = (per_token * prepared.token_weight).sum() / prepared.total_tokens
    tokens = (losses[:, 1:].sum(1) / is_masked.sum(1)).mean()
    torch.testing.assert_close(total, tokens + order.mean())
    terms = objective.terms({"losses": losses}, prepared.targets)
    torch.testing.assert_close(terms["order"].mean(), order.mean())
    torch.testing.assert_close(sum(terms.values()), per_token)
    assert objective.validated_terms(per_token, prepared.targets).keys() == terms.keys()
    for name, term in objective.validated_terms(per_token, prepared.targets).items():
        torch.testing.assert_close(term, terms[name])
    objective, prepared = prepared_of(WINDOWS, windows(2))
    assert objective.validated_terms(torch.ones(2, N), prepared.targets) == {}


def test_losses_of_padding_do_not_count():
    objective, prepared = prepared_of(PAIRS, sentences(16))
    losses = torch.rand(16, N)
    before = objective.loss({"losses": losses}, prepared.targets)
    is_padding = torch.arange(N) >= prepared.context["lengths"][:, None]
    assert is_padding.any()
    after = objective.loss({"losses": losses + 100 * is_padding}, prepared.targets)
    assert torch.equal(before, after)


def test_pairs_are_two_spans_in_order_or_swapped():
    batch = sentences(400)
    pairs = pairs_of(batch.fields, PAIRS, rng_of(batch))
    total = (batch.fields["sentences"] >= 0).sum(1)
    assert torch.equal(pairs.lengths, total + 3)
    cuts = set()
    for i, length in enumerate(pairs.lengths.tolist()):
        tokens, types = pairs.tokens[i].tolist(), pairs.types[i].tolist()
        middle = tokens.index(SEP)
        a, b = tokens[1:middle], tokens[middle + 1 : length - 1]
        assert tokens[0] == CLS
        assert tokens[length - 1 :] == [SEP] + [0] * (N - length)
        assert types == [0] * (middle + 1) + [1] * (length - middle - 1) + [0] * (N - length)
        assert a
        assert b
        first, second = (b, a) if pairs.is_swapped[i] else (a, b)
        assert first + second == list(range(100, 100 + int(total[i])))
        assert len(first) % 6 == 0
        if i % 8 == 7:
            cuts.add(len(first) // 6)
        assert pairs.is_text[i].tolist() == [token >= 100 for token in tokens]
    assert cuts == set(range(1, 9))
    assert 0.4 < pairs.is_swapped.float().mean() < 0.6


def test_each_epoch_cuts_and_swaps_anew():
    batch = sentences(64)
    first = pairs_of(batch.fields, PAIRS, rng_of(batch))
    second = pairs_of(batch.fields, PAIRS, SampleRNG(0, batch.sample_numbers + 64))
    assert not torch.equal(first.is_swapped, second.is_swapped)
    assert not torch.equal(first.types, second.types)


def test_the_mask_is_an_id_that_the_data_never_have_if_they_name_none():
    objective, prepared = prepared_of(WINDOWS, windows(8))
    assert objective.mask == VOCABULARY - 1
    objective, _ = prepared_of(WINDOWS, windows(8), mask_id=5)
    assert objective.mask == 5
    assert (prepared.inputs["tokens"] == VOCABULARY - 1).any()


def test_dropout_is_off_in_evaluations():
    model = dataclasses.replace(MODEL, dropout=0.1)
    batch = windows(4)
    objective = MaskedTokenConfig().build(model, WINDOWS)
    training = objective.prepare(batch, rng_of(batch)).context["dropout_keys"]
    assert len(set(training.tolist())) == 4
    assert (training >= 0).all()
    evaluated = objective.evaluations(batch, rng_of(batch))[""].context
    assert (evaluated["dropout_keys"] < 0).all()
    assert "dropout_keys" not in prepared_of(WINDOWS, batch)[1].context


LATENTS = LatentFacts(count=1, shape=(1, 8, 8), num_classes=10)
DIT = DiTConfig(
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    patch_size=2,
    latent_size=8,
    in_channels=1,
    num_classes=10,
)
LONG = TokenFacts(count=1, sequence_length=2 * N, vocabulary=10)
FULL = TokenFacts(count=1, sequence_length=N, vocabulary=VOCABULARY)


@pytest.mark.parametrize(
    ("keys", "model", "facts", "message"),
    [
        ({}, MODEL, LATENTS, 'Set [data] name = "tokens".'),
        ({}, MODEL, PAIRS, 'Set [data] name = "tokens".'),
        ({"sentence_order": True}, MODEL, WINDOWS, 'Set [data] name = "sentence_pairs".'),
        ({}, DIT, WINDOWS, 'Set [model] name = "bert".'),
        ({}, MODEL, LONG, "[data] sequence_length=128 and [model] sequence_length=64 differ."),
        ({}, MODEL, FULL, "Set [model] vocab_size = 1001."),
        ({"mask_id": 2000}, MODEL, WINDOWS, "Set [model] vocab_size = 2001."),
    ],
)
def test_data_and_models_that_do_not_fit_are_refused(keys, model, facts, message):
    with pytest.raises(UserError) as error:
        MaskedTokenConfig(**keys).build(model, facts)
    assert message in str(error.value)
