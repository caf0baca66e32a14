"""Drawing a token: temperature, top-k, top-p, and draws that hardly depend on rounding."""

from dataclasses import dataclass

import pytest
import torch

from titan_dit.objectives.text_drawing import choose, probabilities

SHARES = torch.tensor([[0.1, 0.4, 0.05, 0.25, 0.2]])
LOGITS = SHARES.log() + 3.0


@dataclass
class Choice:
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0


def test_the_distribution_is_the_softmax_at_a_temperature():
    torch.testing.assert_close(probabilities(LOGITS, Choice()).float(), SHARES)
    half = SHARES.square() / SHARES.square().sum()
    torch.testing.assert_close(probabilities(LOGITS, Choice(temperature=0.5)).float(), half)


KEPT = {
    "top_k 2": (Choice(top_k=2), [1, 3]),
    "top_k above the vocabulary": (Choice(top_k=9), [0, 1, 2, 3, 4]),
    "top_p within the first": (Choice(top_p=0.3), [1]),
    "top_p within the second": (Choice(top_p=0.45), [1, 3]),
    "top_p within the third": (Choice(top_p=0.8), [1, 3, 4]),
    "both: top_p counts what top_k leaves": (Choice(top_k=3, top_p=0.7), [1, 3]),
}


@pytest.mark.parametrize("case", KEPT)
def test_only_the_most_likely_tokens_are_drawn(case):
    choice, kept = KEPT[case]
    assert probabilities(LOGITS, choice)[0].nonzero()[:, 0].tolist() == kept
    uniform = torch.linspace(2.0**-24, 1 - 2.0**-24, 2001)
    drawn = choose(LOGITS.expand(len(uniform), -1), uniform, choice)
    assert drawn.unique().tolist() == kept


def test_the_draws_have_the_distribution_and_temperature_zero_takes_the_most_likely():
    uniform = (torch.arange(1000) + 0.5) / 1000
    drawn = choose(LOGITS.expand(1000, -1), uniform, Choice())
    torch.testing.assert_close(drawn.bincount() / 1000, SHARES[0])
    assert (choose(LOGITS.expand(1000, -1), uniform, Choice(temperature=0.0)) == 1).all()


def test_no_draw_falls_on_a_token_of_probability_zero_or_beyond_the_last():
    logits = torch.full((2, 5), -torch.inf)
    logits[:, 1] = 0.0
    ends = torch.tensor([2.0**-24, 1 - 2.0**-24])
    assert choose(logits, ends, Choice()).tolist() == [1, 1]
    assert choose(logits, ends, Choice(top_k=3, top_p=0.9)).tolist() == [1, 1]


def test_a_rounding_of_the_logits_that_swaps_two_tokens_moves_no_draw():
    even = torch.zeros(1, 4)
    swapped = even + torch.tensor([[0.0, 1e-6, 0.0, -1e-6]])
    uniform = (torch.arange(100) + 0.5) / 100
    for choice in (Choice(), Choice(top_p=0.99)):
        rows = (choose(logits.expand(100, -1), uniform, choice) for logits in (even, swapped))
        assert torch.equal(*rows)
