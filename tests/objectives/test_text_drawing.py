"""Continuing a prompt: windows, ends of documents, texts."""

import pytest
import torch

from titan_dit.config.section import UserError
from titan_dit.config.training import GenerationConfig, SamplingConfig
from titan_dit.data.token_windows import TokenFacts
from titan_dit.data.tokenizing.tokenizer import NumberCodec, codec_of
from titan_dit.models.gpt_config import GPTConfig
from titan_dit.objectives import text_drawing
from titan_dit.objectives.base import DataShare
from titan_dit.objectives.sections import NextTokenConfig
from titan_dit.objectives.text_drawing import Writer, prompt_ids, titled, written

VOCABULARY, WINDOW, END = 10, 6, 9
FACTS = TokenFacts(count=1, sequence_length=WINDOW, vocabulary=VOCABULARY, end_of_document=END)
GREEDY = GenerationConfig(max_new_tokens=8, temperature=0.0)


MODEL = GPTConfig(
    hidden_size=8, num_layers=1, num_heads=2, vocab_size=VOCABULARY, sequence_length=WINDOW
)


def forward(inputs, static):
    """Certain of the sum of the tokens + 1 so far, each times its position, mod VOCABULARY.

    Token 0 counts, so that what fills a window up would be seen.
    """
    sums = ((inputs["tokens"] + 1) * (static["positions"] + 1)).cumsum(1) % VOCABULARY
    return torch.nn.functional.one_hot(sums, VOCABULARY).float()


def expected(prompt, length):
    ids = list(prompt)
    for _ in range(length):
        window = ids[-WINDOW:]
        ids.append(sum((token + 1) * (i + 1) for i, token in enumerate(window)) % VOCABULARY)
    return ids


def writer(is_executor, seen=None):
    def noted(inputs, static):
        if seen is not None:
            seen.append(inputs["tokens"].shape)
        return forward(inputs, static)

    return Writer(noted, MODEL, torch.device("cpu"), is_executor)


@pytest.mark.parametrize("is_executor", [True, False])
def test_the_window_slides_over_a_text_that_is_longer(is_executor):
    seen = []
    found = writer(is_executor, seen).extend(
        [3, 1], torch.arange(2), 0, GREEDY, GREEDY.max_new_tokens, None
    )
    assert found.tolist() == [expected([3, 1], 8)] * 2
    widths = [WINDOW] * 8 if is_executor else [2, 3, 4, 5, 6, 6, 6, 6]
    assert seen == [(2, width) for width in widths]


def test_a_text_depends_on_seed_and_number_alone():
    def flat(inputs, static):
        return torch.zeros(*inputs["tokens"].shape, VOCABULARY)

    drawing = GenerationConfig(max_new_tokens=12)
    even = Writer(flat, MODEL, torch.device("cpu"), is_executor=True)
    whole = even.extend([1], torch.arange(4), 5, drawing, drawing.max_new_tokens, None)
    assert torch.equal(
        whole[2:], even.extend([1], torch.arange(2, 4), 5, drawing, drawing.max_new_tokens, None)
    )
    assert not torch.equal(
        whole, even.extend([1], torch.arange(4), 6, drawing, drawing.max_new_tokens, None)
    )
    assert len({tuple(row) for row in whole.tolist()}) == 4
    assert len(set(whole[0, 1:].tolist())) > 3  # Each token has a draw of its own.


def test_one_process_stops_when_every_text_has_ended_and_an_executor_does_not():
    prompt = [9, 0]  # Of the prompt's own token the text does not end.
    ends = expected(prompt, 8).index(END, 2) - 1
    given = prompt, torch.arange(1), 0, GREEDY, GREEDY.max_new_tokens, END
    whole, stopped = (writer(is_executor).extend(*given) for is_executor in (True, False))
    assert whole.shape == (1, 10)
    assert stopped.shape == (1, 2 + ends)
    assert torch.equal(whole[:, : 2 + ends], stopped)


def test_a_text_is_the_prompt_and_what_follows_up_to_the_end_of_the_document():
    assert written([9, 4, 2, 9, 5], 2, NumberCodec(), END) == "4 2"
    assert written([4, 2, 5], 1, NumberCodec(), None) == "4 2 5"
    assert titled(["a", "b\nc"]) == "--- 0\na\n--- 1\nb\nc\n"


def test_a_preview_has_one_text_per_sample_on_any_number_of_data_ranks(tmp_path):
    generation = GenerationConfig(prompt="1 2", max_new_tokens=4, temperature=2.0)
    parts = []

    def share(rank, ranks):
        def gather(rows):
            parts.append(rows)
            return torch.cat(parts) if len(parts) == ranks else rows

        return DataShare(torch.device("cpu"), rank, ranks, gather)

    text_drawing.preview(forward, MODEL, FACTS, 5, generation, 7, share(0, 1)).write(
        tmp_path / "whole.txt"
    )
    parts.clear()
    text_drawing.preview(forward, MODEL, FACTS, 5, generation, 7, share(0, 2))
    last = text_drawing.preview(forward, MODEL, FACTS, 5, generation, 7, share(1, 2))
    last.write(tmp_path / "parts.txt")
    whole = (tmp_path / "whole.txt").read_text()
    assert whole == (tmp_path / "parts.txt").read_text()
    assert [line for line in whole.splitlines() if line.startswith("---")] == [
        f"--- {i}" for i in range(5)
    ]
    assert last.suffix == ".txt"


def test_a_preview_has_few_texts_by_default(tmp_path):
    generation = GenerationConfig(prompt="1 2", max_new_tokens=1)
    alone = DataShare(torch.device("cpu"))
    objective = NextTokenConfig().build(MODEL, FACTS)
    drawn = objective.preview(forward, SamplingConfig(), generation, 7, alone)
    drawn.write(tmp_path / "few.txt")
    assert (tmp_path / "few.txt").read_text().count("---") == 4


BAD = {
    "words": ("To be", FACTS, "prompt: the prompt holds 'To', but the data names no tokenizer"),
    "id": ("3 10", FACTS, "prompt has the token id 10, but the data's are below 10"),
    "empty": (
        " ",
        TokenFacts(count=1, sequence_length=WINDOW, vocabulary=VOCABULARY),
        "prompt is empty, but the data has no token that ends a document",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_prompt_is_one_clear_error(case):
    text, facts, wanted = BAD[case]
    with pytest.raises(UserError, match=wanted):
        prompt_ids(text, NumberCodec(), facts, "[generation] prompt")


def test_an_empty_prompt_begins_a_document():
    assert prompt_ids("", NumberCodec(), FACTS, "--prompt") == [END]


def test_a_tokenizer_that_is_missing_or_none_is_one_clear_error(tmp_path):
    pytest.importorskip("tokenizers")
    with pytest.raises(UserError, match="there is no such file"):
        codec_of(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="not a tokenizer"):
        codec_of(str(tmp_path / "tokenizer.json"))
