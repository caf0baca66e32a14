"""Samples of consecutive sentences: as Megatron builds them, the same at every start."""

import itertools
import json
import pickle
import random

import numpy as np
import pytest
import torch
from refusals import refused

from titan_dit.data.indexed_file import IndexedWriter
from titan_dit.data.sections import SentencePairs
from titan_dit.data.sentence_pairs import Targets

LENGTH = 35  # 32 without special tokens.
SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[MASK]")


def write(prefix, documents):
    """Write documents, given as lengths of their sentences; ids count up from 4."""
    count = 4
    with IndexedWriter(prefix, np.dtype("uint16")) as writer:
        for lengths in documents:
            ids = np.arange(count, count + sum(lengths), dtype=np.uint16)
            writer.add(ids, lengths, [len(lengths)])
            count += len(ids)
    return str(prefix)


def tokenizer(folder, vocabulary=SPECIAL):
    model = {"type": "WordPiece", "vocab": {token: i for i, token in enumerate(vocabulary)}}
    file = folder / "tokenizer.json"
    file.write_text(json.dumps({"model": model}))
    return str(file)


def opened(folder, documents, **keys):
    path = write(folder / "sentences", documents)
    fixed = {"tokenizer": tokenizer(folder), "vocab_size": 60000, "split": (1,)}
    section = SentencePairs(paths=(path,), **fixed | {"sequence_length": LENGTH} | keys)
    return section.open()


def texts(source):
    """The ids and the sentence numbers of each sample, without padding."""
    found = []
    for row in range(len(source)):
        sample = source[row]
        is_text = sample["sentences"] >= 0
        assert (sample["tokens"][~is_text] == 0).all()
        found.append((sample["tokens"][is_text].tolist(), sample["sentences"][is_text].tolist()))
    return found


def built_one_by_one(documents, targets):
    """(first sentence, last + 1, target) of every sample, by Megatron's loop over sentences."""
    found, first = [], 0
    for lengths in documents:
        start, tokens = 0, 0
        for i, length in enumerate(lengths if len(lengths) > 1 else ()):
            (target,) = targets.of(np.array([first + start])).tolist()
            tokens += length
            left, num = len(lengths) - i - 1, i + 1 - start
            if (tokens >= target and left > 1 and num > 1) or left == 0:
                found.append((first + start, first + i + 1, target))
                start, tokens = i + 1, 0
        first += len(lengths)
    return found


@pytest.mark.parametrize("short_share", [0.0, 0.5])
def test_samples_are_of_the_sentences_that_megatrons_loop_takes(tmp_path, short_share):
    draw = random.Random(0)
    documents = [
        [draw.choice((1, 3, 7, 20, 50)) for _ in range(draw.randrange(1, 30))] for _ in range(60)
    ]
    source = opened(tmp_path, documents, short_seq_prob=short_share)
    starts = np.cumsum([0, *(n for lengths in documents for n in lengths)]) + 4
    expected = built_one_by_one(documents, Targets(LENGTH - 3, short_share))
    found = texts(source)
    assert len(found) == len(expected) == source.facts.count
    for (ids, numbers), (first, end, target) in zip(found, expected, strict=True):
        assert ids == list(range(ids[0], ids[-1] + 1))
        assert starts[first] <= ids[0] < starts[first + 1]
        assert ids[-1] < starts[end]
        assert len(ids) == min(target, starts[end] - ids[0])
        assert numbers[0] == 0
        assert numbers[-1] >= 1
        assert all(b - a in (0, 1) for a, b in itertools.pairwise(numbers))
        ends_here = [b in starts for b in ids[1:]]
        assert [b > a for a, b in itertools.pairwise(numbers)] == ends_here


def test_short_sentences_are_kept_whole_and_the_remainder_is_told(tmp_path):
    source = opened(tmp_path, [[10, 10, 10, 10, 10], [9]], short_seq_prob=0.0)
    # Four sentences reach 32 tokens; the fifth alone would be no pair.
    assert texts(source) == [(list(range(4, 36)), [0] * 10 + [1] * 10 + [2] * 10 + [3] * 2)]
    assert source.facts.num_left_out == 18 + 9
    assert source.facts.about == "pairs of 59 tokens, 27 left out"


def test_a_long_first_sentence_leaves_half_of_the_sample_to_the_second(tmp_path):
    source = opened(tmp_path, [[100, 40]], short_seq_prob=0.0)
    ((ids, numbers),) = texts(source)
    assert numbers == [0] * 16 + [1] * 16
    assert ids == list(range(4 + 84, 4 + 116))


def test_short_samples_are_a_share_of_all_and_the_same_at_every_start(tmp_path):
    documents = [[8] * 40] * 50
    source = opened(tmp_path, documents, short_seq_prob=0.3)
    found = texts(source)
    share = sum(len(ids) < 32 for ids, _ in found) / len(found)
    assert 0.2 < share < 0.4
    assert texts(opened(tmp_path, documents, short_seq_prob=0.3)) == found
    assert texts(pickle.loads(pickle.dumps(source))) == found


def test_validation_has_documents_of_its_own(tmp_path):
    documents = [[8] * 12] * 20
    path = write(tmp_path / "sentences", documents)
    keys = {"tokenizer": tokenizer(tmp_path), "vocab_size": 60000, "sequence_length": LENGTH}
    section = SentencePairs(paths=(path,), split=(3, 1), **keys)
    parts = section.open(), section.validation_part().open()
    train, held_out = ({i for ids, _ in texts(part) for i in ids} for part in parts)
    assert max(train) < 4 + 15 * 96 <= min(held_out)
    assert len(section.at(path).open()) > len(parts[0])


def test_several_paths_are_numbered_one_after_another(tmp_path):
    first = write(tmp_path / "one", [[8] * 12])
    second = write(tmp_path / "two", [[9] * 12])
    keys = {"tokenizer": tokenizer(tmp_path), "vocab_size": 500, "sequence_length": LENGTH}
    alone = [SentencePairs(paths=(p,), split=(1,), **keys).open() for p in (first, second)]
    both = SentencePairs(paths=(first, second), split=(1,), **keys).open()
    assert texts(both) == [*texts(alone[0]), *texts(alone[1])]
    assert both.facts.digest not in [source.facts.digest for source in alone]
    with pytest.raises(IndexError):
        both[len(both)]
    read = both.read([3, 0])
    assert torch.equal(read["tokens"][1], both[0]["tokens"])


def test_data_without_pairs_are_refused(tmp_path):
    path = write(tmp_path / "one", [[8], [9]])
    keys = {"tokenizer": tokenizer(tmp_path), "vocab_size": 500, "sequence_length": LENGTH}
    message = refused(SentencePairs(paths=(path,), split=(1,), **keys).open)
    assert message.endswith(
        "its part for training has no document of two sentences. "
        "Tokenize with --split-sentences, or choose another `split`."
    )
    other = keys | {"tokenizer": tokenizer(tmp_path, ("[PAD]", "a"))}
    message = refused(SentencePairs(paths=(path,), split=(1,), **other).open)
    assert "has no [CLS], [SEP], [MASK], which pairs of sentences need." in message
    message = refused(lambda: SentencePairs(paths=(path,), vocab_size=5, sequence_length=LENGTH))
    assert "Set tokenizer (a tokenizer.json)." in message


def test_an_id_beyond_the_vocabulary_is_refused(tmp_path):
    message = refused(lambda: opened(tmp_path, [[8] * 12], vocab_size=50))
    assert "is outside vocab_size=50" in message
