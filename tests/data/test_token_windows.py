"""Windows of tokens: every token is a target once an epoch, in every order and process."""

import json
import pickle
from collections import Counter
from pathlib import Path

import pytest
import torch
from refusals import refused
from small_tokens import byte_level_file, counting, tokens, write_tokens

from titan_dit.config.section import UserError
from titan_dit.data.base import BadSampleError
from titan_dit.data.loader import NumberedSamples
from titan_dit.data.sections import Plays
from titan_dit.data.token_windows import TokenFacts


@pytest.fixture
def first(tmp_path):
    return write_tokens(tmp_path / "first", counting(0, [30, 1, 20]))


@pytest.fixture
def second(tmp_path):
    return write_tokens(tmp_path / "second", counting(100, [19]), "int32")


def whole(source):
    return source.read(range(len(source)))["tokens"]


@pytest.mark.parametrize("length", [1, 7, 8, 50])
def test_every_token_is_the_target_of_one_window_and_the_rest_is_told(first, second, length):
    source = tokens(first, second, sequence_length=length).open()
    windows = whole(source)
    assert windows.shape == (len(source), length + 1)
    targets = Counter(windows[:, 1:].flatten().tolist())
    assert max(targets.values()) == 1
    # The first token of a file has nothing before it.
    never = set(range(1, 51)) | set(range(101, 119))
    never -= targets.keys()
    short = 0 if length < 19 else 1
    assert len(never) == 50 % length + (18 % length) * (1 - short) + 18 * short
    assert source.facts.num_left_over == len(never) + short
    assert f"{source.facts.num_left_over} left over" in source.facts.about
    assert source.facts.num_tokens == 70


def test_a_window_is_neighbouring_tokens_of_one_file(first, second):
    source = tokens(first, second).open()
    windows = whole(source)
    assert windows.dtype == torch.int64
    assert (windows.diff(dim=1) == 1).all()
    assert windows[:, 0].tolist() == [0, 8, 16, 24, 32, 40, 100, 108]
    assert source.fields["tokens"].shape == (9,)
    assert torch.equal(source.read([7, 0, 7])["tokens"], windows[[7, 0, 7]])
    assert torch.equal(source[6]["tokens"], windows[6])
    assert torch.equal(whole(pickle.loads(pickle.dumps(source))), windows)
    with pytest.raises(IndexError):
        source.read([8])


def test_an_epoch_without_weights_holds_each_window_once(first, second):
    order = tokens(first, second).open().order(0, (), "feistel")
    assert sorted(order.rows(range(8, 16))) == list(range(8))


def test_weights_mix_the_files(first, second):
    source = tokens(first, second, weights=(1, 3)).open()
    order = source.order(0, (), "feistel")
    drawn = whole(source)[order.rows(range(400))]
    assert (drawn[:, 0] >= 100).sum() == 300
    assert order.num_rows == len(source)


def test_split_parts_whole_documents_and_validation_reads_the_second(tmp_path):
    path = write_tokens(tmp_path / "set", counting(0, [10] * 20))
    config = tokens(path, sequence_length=3, split=(16, 3, 1))
    assert config.has_validation_part
    training, validation = config.open(), config.validation_part().open()
    assert (whole(training).min(), training.facts.num_tokens) == (0, 160)
    assert (whole(validation).min(), validation.facts.num_tokens) == (160, 30)
    assert whole(training).max() < 160 <= whole(validation).max() < 190
    assert training.facts.digest != validation.facts.digest
    assert config.at(path).open().facts.num_tokens == 200
    assert not tokens(path).has_validation_part


def test_split_takes_documents_as_megatron_rounds_them(tmp_path):
    path = write_tokens(tmp_path / "set", counting(0, [2] * 100))
    config = tokens(path, sequence_length=1, split=(949, 50, 1))
    assert config.open().facts.num_tokens == 190
    assert config.validation_part().open().facts.num_tokens == 10


def test_the_digest_follows_the_contents_and_not_the_path(first, tmp_path):
    before = tokens(first).open().facts
    (tmp_path / "moved").mkdir()
    for suffix in ("bin", "idx"):
        Path(f"{first}.{suffix}").rename(tmp_path / "moved" / f"x.{suffix}")
    moved = tokens(str(tmp_path / "moved" / "x"))
    assert moved.open().facts == before
    assert moved.survey().facts.digest == before.digest
    write_tokens(tmp_path / "moved" / "x", counting(1, [30, 1, 20]))
    assert moved.open().facts.digest != before.digest


def test_facts_tell_the_bytes_of_a_byte_level_tokenizer(tmp_path):
    path = write_tokens(tmp_path / "set", [[1, 2, 3, 0], [3, 3, 3, 0]])
    tokenizer = byte_level_file(tmp_path / "tokenizer.json")
    config = tokens(path, vocab_size=None, tokenizer=tokenizer, sequence_length=3, split=(1, 1))
    facts = config.open().facts
    assert (facts.vocabulary, facts.end_of_document, facts.bytes_per_token) == (4, 0, 7 / 4)
    assert config.validation_part().open().facts.bytes_per_token == 12 / 4
    assert TokenFacts.from_json(json.loads(json.dumps(facts.as_json()))) == facts
    without = tokens(path, sequence_length=3, end_of_document=7).open().facts
    assert (without.bytes_per_token, without.end_of_document) == (None, 7)
    few = tokens(path, tokenizer=tokenizer, vocab_size=3, sequence_length=3)
    message = refused(few.survey)
    assert "vocab_size=3 is less than the 4 tokens" in message


@pytest.mark.parametrize("bad", [1000, -1])
def test_ids_outside_the_vocabulary_are_refused_by_name(tmp_path, bad, monkeypatch):
    documents = counting(0, [10, 10, 10])
    documents[2][4] = bad
    path = write_tokens(tmp_path / "set", documents, "int32")
    said = f"set.bin: id {bad} at token 24, in document 2, is outside vocab_size=1000"
    assert said in refused(tokens(path).open)
    # Beyond the tokens that are checked at the start: when it is read, and then for good.
    monkeypatch.setattr("titan_dit.data.token_windows.CHECKED_TOKENS", 10)
    source = tokens(path, sequence_length=5).open()
    assert len(source.read([0, 1])["tokens"]) == 2
    error = NumberedSamples(source, lambda fields: None).__getitems__([(0, 0), (1, 4)])
    assert isinstance(error, BadSampleError)
    assert said in str(error)
    assert said in refused(tokens(path, verify=True).open)


def test_a_node_may_have_its_own_copy_but_not_another_file(first):
    survey = tokens(first).survey()
    copy = Path(f"{first}.bin")
    copy.write_bytes(copy.read_bytes())
    assert len(whole(tokens(first).open_surveyed(survey))) == 6
    copy.write_bytes(copy.read_bytes() + b"12")
    message = refused(lambda: tokens(first).open_surveyed(survey))
    assert "104 bytes on this node, but 102 on the first rank's" in message
    copy.unlink()
    assert "cannot be opened" in refused(lambda: tokens(first).open_surveyed(survey))


def test_a_file_that_shrinks_is_an_error_and_no_crash(first):
    source = tokens(first).open()
    with Path(f"{first}.bin").open("r+b") as file:
        file.truncate(60)
    with pytest.raises(UserError, match=r"first\.bin"):
        whole(source)


def test_parts_without_a_window_are_refused(first, second):
    message = refused(tokens(first, second, sequence_length=18, weights=(1, 1), split=(1, 9)).open)
    assert "its part for training holds" in message
    assert tokens(first, second, sequence_length=30).open().facts.num_left_over == 20 + 19
    message = refused(tokens(second, sequence_length=19).open)
    assert "19 tokens, fewer than a window of sequence_length=19 + 1" in message


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"weights": (1.0,)}, "1 weights for 2 paths. Give one for each"),
        ({"split": (0, 1)}, "up to three shares"),
        ({"split": (1, 1, 1, 1)}, "up to three shares"),
        ({"vocab_size": None}, "Set tokenizer"),
        ({"weights": (1.0, 0.0)}, "must be above 0"),
    ],
)
def test_keys_that_do_not_fit_are_refused(keys, message):
    with pytest.raises(UserError, match=message):
        tokens(**{"paths": ("a", "b")} | keys)


def test_what_the_files_or_the_tokenizer_refute_is_refused(first):
    assert "Give the path of a .bin without its suffix: --data.paths" in refused(tokens().open)
    message = refused(tokens(first, end_of_document=1000).open)
    assert "end_of_document=1000 is not below vocab_size=1000" in message


def test_a_run_finds_its_tokenizer_from_another_folder(first, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    byte_level_file(Path("here.json"))
    facts = tokens(first, vocab_size=1000, tokenizer="here.json").survey().facts
    assert facts.tokenizer == str(tmp_path / "here.json")


def test_the_plays_are_part_of_the_package():
    plays = Plays(sequence_length=128)
    training, validation = plays.open(), plays.validation_part().open()
    assert (len(training), len(validation)) == (2758, 146)
    facts = training.facts
    assert (facts.vocabulary, facts.end_of_document) == (2048, 0)
    assert 2.7 < validation.facts.bytes_per_token < facts.bytes_per_token < 2.8
    # The text: 1.04 MB, of which the last 5% of every play are held out.
    sizes = [f.num_tokens * f.bytes_per_token for f in (facts, validation.facts)]
    assert sizes[1] / sum(sizes) == pytest.approx(0.05, abs=0.001)
    assert (whole(validation) == 0).sum() >= 7
