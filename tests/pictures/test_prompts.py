"""Prompts: embedded as the captions of the data were, by the same encoder only."""

from dataclasses import replace

import pytest
import torch
from refusals import refused
from tiny_text import CAPTIONS, save_encoder

from titan_dit.data.latent_facts import LatentFacts
from titan_dit.pictures import text_encoder
from titan_dit.pictures.prompts import open_encoder

CPU = torch.device("cpu")
FLAG = "--text-encoder"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("prompts")
    save_encoder(root / "t5")
    save_encoder(root / "other", seed=1)
    return root


def facts_of(folder, layer=1, template="a {}"):
    """Facts of a dataset that an encoder made."""
    encoder = text_encoder.load(str(folder), CPU, layers=(layer,), template=template)
    text = encoder.facts(8, "float16", encoder.encode([""])[0])
    source = str(folder)
    return LatentFacts(shape=(1, 2, 2), count=1, num_classes=1, text=text, text_source=source)


@pytest.fixture(scope="module")
def data(root):
    return facts_of(root / "t5")


def test_prompts_have_the_embeddings_of_equal_captions(root, data):
    found = open_encoder(CAPTIONS, data, None, 8, CPU, FLAG).fields([*CAPTIONS[:2], "", "a red"])
    encoder = text_encoder.load(str(root / "t5"), CPU, layers=(1,), template="a {}")
    assert found["text"].shape == (4, 8, 32)
    assert found["text"].dtype == torch.float16
    assert found["text_length"].tolist() == [7, 5, 2, 4]
    for row, caption in enumerate((*CAPTIONS[:2], "", "a red")):
        (alone,) = encoder.encode([caption])
        torch.testing.assert_close(
            found["text"][row, : len(alone)].float(), alone, rtol=0, atol=2e-3
        )
        assert not found["text"][row, len(alone) :].any()


def test_long_prompts_are_cut_and_counted(data):
    encoder = open_encoder(CAPTIONS, data, None, 6, CPU, FLAG)
    assert encoder.num_cut(CAPTIONS) == 2
    assert encoder.fields(CAPTIONS)["text_length"].tolist() == [6, 5, 3, 6]


def test_an_encoder_reads_no_more_tokens_than_it_has_positions(tmp_path):
    save_encoder(tmp_path / "clip", "CLIPTextModel")
    encoder = open_encoder(["a " * 40], facts_of(tmp_path / "clip"), None, 30, CPU, FLAG)
    assert encoder.num_cut(["a " * 40]) == 1
    assert encoder.fields(["a " * 40])["text_length"].tolist() == [16]


def test_the_empty_prompt_needs_no_encoder(data):
    moved = replace(data, text_source="")
    found = open_encoder(["", " "], moved, None, 8, CPU, FLAG).fields(["", " "])
    assert torch.equal(found["text"][1, :2], data.text.null_embedding.half())


def test_another_encoder_or_none_is_refused_by_name(root, data):
    def said(source, facts=data, prompts=("a",)):
        message = refused(lambda: open_encoder(prompts, facts, source, 8, CPU, FLAG))
        assert "\n" not in message
        return message

    made_by = f"but the embeddings of captions were made by T5EncoderModel {data.text.digest[:12]}"
    other = str(root / "other")
    assert f"--text-encoder {other} is T5EncoderModel" in said(other)
    for prompts in (("a",), ("",)):
        assert made_by in said(other, prompts=prompts)
    assert "layer 1, template 'a {}'" in said(other)
    other_words = replace(data, text=replace(data.text, tokenizer="0" * 64))
    assert "tokenizer 000000000000" in said(None, other_words)
    gone = replace(data, text_source=str(root / "gone"))
    assert "gone: no such folder. It made the embeddings of the captions." in said(None, gone)
    assert said(None, gone).endswith("If it is somewhere else now: --text-encoder DIR.")
    assert "T5EncoderModel" in said(None, replace(data, text_source=""))


def test_a_prompt_of_bytes_that_are_no_text_is_refused(root, data):
    said = refused(lambda: open_encoder(["\udcff"], data, str(root / "t5"), 8, CPU, "--x"))
    assert said == "the prompt '\\udcff' is not UTF-8. Write it as such."
