"""Perplexity and bits per byte of a language model's loss."""

import math

import pytest

from titan_dit.config.section import UserError
from titan_dit.config.training import GenerationConfig, SamplingConfig
from titan_dit.data.base import DataFacts
from titan_dit.data.token_windows import TokenFacts
from titan_dit.models.gpt_config import GPTConfig
from titan_dit.objectives.sections import NextTokenConfig

SIZES = {"sequence_length": 4, "vocabulary": 10}
MODEL = GPTConfig(hidden_size=8, num_layers=1, num_heads=2, sequence_length=4, vocab_size=10)
TRAINED_ON = TokenFacts(count=1, bytes_per_token=9.0, **SIZES)
OBJECTIVE = NextTokenConfig().build(MODEL, TRAINED_ON)


def test_six_bits_a_token_of_three_bytes_are_two_bits_a_byte():
    facts = TokenFacts(count=1, bytes_per_token=3.0, **SIZES)
    found = OBJECTIVE.summary({"": 6 * math.log(2)}, facts)
    assert found == pytest.approx({"perplexity": 64, "bits_per_byte": 2})


def test_without_the_bytes_of_a_token_there_is_only_the_perplexity():
    facts = TokenFacts(count=1, **SIZES)
    assert OBJECTIVE.summary({"": 0.0}, facts) == {"perplexity": 1.0}
    assert OBJECTIVE.summary({"": 0.0}, DataFacts(count=1)) == {"perplexity": 1.0}


def test_a_loss_beyond_all_bounds_has_a_finite_perplexity():
    assert math.isfinite(OBJECTIVE.summary({"": 1e6}, TRAINED_ON)["perplexity"])


def test_a_prompt_that_does_not_fit_the_data_is_refused_before_training():
    with pytest.raises(UserError, match="prompt has the token id 12"):
        OBJECTIVE.check_preview(SamplingConfig(), GenerationConfig(prompt="12"))
