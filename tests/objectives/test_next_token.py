"""Next-token prediction: which tokens are inputs, which are targets, what counts."""

import pytest
import torch
from tiny import tiny_config
from tiny_gpt import gpt_config

from titan_dit.config.section import UserError
from titan_dit.data.base import Batch
from titan_dit.data.token_windows import TokenFacts
from titan_dit.models.bert_config import BERTConfig
from titan_dit.objectives.sections import NextTokenConfig
from titan_dit.rng import SampleRNG

MODEL = gpt_config().model
FACTS = TokenFacts(count=4, sequence_length=16, vocabulary=200, end_of_document=7)


def prepared(objective, tokens, weight=None):
    numbers = torch.arange(len(tokens))
    weight = torch.ones(len(tokens)) if weight is None else weight
    batch = Batch({"tokens": tokens}, numbers, weight, float(len(tokens)))
    return objective.prepare(batch, SampleRNG(0, numbers))


def test_every_token_but_the_first_is_a_target_of_the_one_before():
    tokens = torch.arange(34).view(2, 17)
    found = prepared(NextTokenConfig().build(MODEL, FACTS), tokens)
    assert torch.equal(found.context["next_tokens"], found.inputs["tokens"] + 1)
    assert found.inputs["tokens"][0].tolist() == list(range(16))
    assert found.context["next_tokens"][1, -1] == 33
    assert found.static["positions"].tolist() == list(range(16))
    assert found.total_tokens == 32


def test_what_follows_the_end_of_a_document_can_be_left_out():
    tokens = torch.full((2, 17), 3)
    tokens[0, 5], tokens[1, 16] = 7, 7  # The last one is only a target.
    objective = NextTokenConfig(mask_end_of_document=True).build(MODEL, FACTS)
    found = prepared(objective, tokens, weight=torch.tensor([1.0, 0.0]))
    wanted = torch.ones(2, 16)
    wanted[0, 5], wanted[1] = 0, 0
    assert torch.equal(found.weight, wanted)
    assert found.total_tokens is None  # Only all ranks together know it.


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (TokenFacts(count=1, sequence_length=32, vocabulary=200), "sequence_length=32 and"),
        (TokenFacts(count=1, sequence_length=16, vocabulary=201), "Set .model. vocab_size = 201"),
        (TokenFacts(count=1, sequence_length=16, vocabulary=200), "Set .data. end_of_document"),
    ],
)
def test_data_that_do_not_fit_the_model_are_refused(facts, words):
    with pytest.raises(UserError, match=words):
        NextTokenConfig(mask_end_of_document=True).build(MODEL, facts)


def test_other_data_and_other_models_are_refused():
    digits = tiny_config()
    with pytest.raises(UserError, match=r'Set .model. name = "gpt"'):
        NextTokenConfig().model_spec(digits.model)
    # It has a causal model's keys.
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4}
    bert = BERTConfig(**sizes, vocab_size=200, sequence_length=16)
    with pytest.raises(UserError, match=r'name="bert" is no causal language model.* = "gpt"'):
        NextTokenConfig().model_spec(bert)
    with pytest.raises(UserError, match=r'Set .data. name = "tokens"'):
        NextTokenConfig().build(MODEL, digits.data.open().facts)
