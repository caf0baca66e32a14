"""Buckets of one shape and one length of text: which row is in which, and what is read of it."""

import pickle
import tracemalloc
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from captioned_sets import write_set
from grouped_joint import MULTIPLE, write_sets
from refusals import refused
from safetensors.torch import load_file, save_file
from test_latents import VIDEO_VAE, write_clips

from titan_dit.config import catalog, config_file
from titan_dit.data import latents
from titan_dit.data.caption_embeddings import CaptionEmbeddings
from titan_dit.data.held_out import held_out_rows
from titan_dit.data.latent_facts import LatentFacts, TextFacts
from titan_dit.data.latents import LatentBucket, LatentShards
from titan_dit.data.text_groups import TextGroups, padded


def section_of(**table):
    tables = {"data": {"name": "latents", **table}}
    return config_file.build_sections(tables, catalog.variant)["data"]


@pytest.fixture
def folder(tmp_path):
    write_sets(tmp_path)
    return tmp_path


def numbers_of(fields):
    return fields["latent"].flatten(1)[:, 0].int().tolist()


def test_a_group_holds_the_caption_and_the_empty_one():
    tokens = np.array([0, 1, 4, 5, 8, 9])
    assert padded(tokens, 1, 4).tolist() == [4, 4, 4, 8, 8, 12]
    # An empty prompt with a long template takes a caption's place when it is dropped.
    assert padded(tokens, 6, 4).tolist() == [8, 8, 8, 8, 8, 12]
    assert padded(tokens, 0, 32).tolist() == [32] * 6


def test_rows_of_a_bucket_have_one_shape_and_one_length_of_text(folder):
    plain = LatentShards(folder / "one")
    source = plain.in_text_groups(MULTIPLE)
    assert isinstance(source, TextGroups)
    assert list(source.bucket_names) == [
        "2x4x8, 4 text tokens",
        "2x4x8, 8 text tokens",
        "2x4x8, 12 text tokens",
        "2x4x4, 4 text tokens",
        "2x4x4, 8 text tokens",
        "2x4x4, 12 text tokens",
    ]
    # Of lengths 3, 5, 4 and the list of 2 and 9: half of the rows need 4 tokens.
    assert source.facts.bucket_counts == (12, 6, 6, 10, 5, 5)
    seen = []
    for each in (source, pickle.loads(pickle.dumps(source))):
        seen.clear()
        for bucket, rows in enumerate(each.bucket_rows):
            found, fields = each.read(rows), each.bucket_fields(bucket)
            for name, value in found.items():
                assert tuple(value.shape[1:]) == fields[name].shape, name
                assert value.dtype == fields[name].dtype
            own = numbers_of(found)
            seen += own
            tokens = {"4": 4, "8": 8, "1": 12}[source.bucket_names[bucket].split(", ")[1][0]]
            assert {padded(plain.text_lengths()[n : n + 1], 1, 4).item() for n in own} == {tokens}
            for text, length, number in zip(found["text"], found["text_length"], own, strict=True):
                assert set(text[:length].flatten().tolist()) <= {number, number + 1000}
                assert not text[length:].any()
        assert sorted(seen) == list(range(44))


def test_a_list_of_captions_is_drawn_within_the_group_of_its_longest_one(folder):
    source = LatentShards(folder / "one").in_text_groups(MULTIPLE)
    rows = source.bucket_rows[2]
    drawn = source.read_numbered([rows[0]] * 30, list(range(30)))
    assert drawn["text"].shape[1] == 12
    assert set(drawn["text_length"].tolist()) == {2, 9}
    shown = source.captions(list(rows))
    assert [
        f"row {n}, " in text for n, text in zip(numbers_of(source.read(rows)), shown, strict=True)
    ]
    text = source.read_fields(("text",), [0, rows[0]])["text"]  # Of several buckets.
    assert text.shape == (2, 11, 4)
    with pytest.raises(ValueError, match="rows of 2 buckets have no common shape"):
        source.read([0, rows[0]])


def test_a_picture_and_its_mirror_image_stay_neighbours(tmp_path):
    write_set(tmp_path / "set", {(4, 4): 12}, lengths=(2, 6), copies=2)
    source = LatentShards(tmp_path / "set").in_text_groups(MULTIPLE)
    assert source.copies == 2
    numbers = numbers_of(source.read(source.bucket_rows[0]))
    assert numbers == [0, 1, 4, 5, 8, 9]
    held_out = held_out_rows(source, 0, 4, "feistel")
    assert all(
        first % 2 == 0 and other == first + 1 for first, other in np.reshape(held_out, (2, 2))
    )


def test_of_the_chosen_buckets_alone_rows_and_their_captions_are_read(tmp_path):
    """Two buckets of three: rows 0 to 7 and 18 to 27 of the folder, each with its mirror image."""
    sizes = {(4, 8): 8, (4, 4): 10, (8, 4): 10}
    write_set(tmp_path / "set", sizes, lengths=(2, 6, 3), copies=2)
    section = section_of(path=str(tmp_path / "set"), buckets=["4x8", "8x4"])
    whole, source = section_of(path=section.path).open(), section.open()
    left = [*range(8), *range(18, 28)]
    assert len(source) == 18
    assert source.bucket_names == ["2x4x8", "2x8x4"]
    assert source.facts.digest != whole.facts.digest
    assert section.bucket_counts() == {((2, 4, 8), 0): 8, ((2, 8, 4), 0): 10}
    assert source.text_lengths().tolist() == whole.text_lengths()[left].tolist()
    for each in (source, pickle.loads(pickle.dumps(source)), source.in_text_groups(MULTIPLE)):
        seen = []
        for rows in each.bucket_rows:
            found, names = each.read(rows), [each.row_name(row) for row in rows]
            own = numbers_of(found)
            assert names == [f"row {number}" for number in own]
            assert found["text"][:, 0, 0].tolist() == [number // 2 * 2 for number in own]
            shown = [f"row {number // 2 * 2}, 0" for number in own]
            assert each.captions(list(rows)) == shown
            assert each.read_fields(("text",), list(rows))["text"][:, 0, 0].tolist() == (
                found["text"][:, 0, 0].tolist()
            )
            seen += own
        assert sorted(seen) == left
        held_out = held_out_rows(each, 0, 4, "feistel")
        assert len({each.row_name(row) for row in held_out} & {f"row {n}" for n in left}) == 4
        order = each.order(0, (), "feistel", [1] * len(each.bucket_rows))
        assert list(each.lines(order)) == ["left out by [data] buckets: 10 samples (10 of 4x4)"]


def test_a_single_chosen_bucket_is_data_of_one_shape(tmp_path):
    write_clips(tmp_path / "set", vae=VIDEO_VAE)
    section = section_of(path=str(tmp_path / "set"), buckets=["9 x 32x24"])
    source = section.open()
    assert (section.sample_shape(), section.bucket_counts()) == ((2, 3, 3, 4), {})
    assert (source.facts.bucket_shapes, len(source)) == ((), 4)
    assert source.fields["latent"].shape == (2, 3, 3, 4)
    # Classes stratify its held-out rows, and they are those of its own rows.
    assert source.groups().tolist() == [0, 1, 0, 1]


def test_a_validation_set_may_have_only_some_of_the_chosen_buckets(tmp_path):
    write_set(tmp_path / "one", {(4, 8): 2, (4, 4): 2})
    section = section_of(path=str(tmp_path / "set"), buckets=["8x4", "4x8"])
    assert section.at(str(tmp_path / "one")).open().facts.shape == (2, 4, 8)


BAD_BUCKETS = {
    "unknown": (["4x9"], '[data] buckets: "4x9" is no bucket of {}. Name some of "8x4", "4x4".'),
    "text": (["2x4x8\n"], '[data] buckets: "2x4x8\\n" is no bucket of {}. Name some of'),
    "empty": ([], "[data] buckets=[] choose nothing. Name some buckets of path, or leave"),
    "number": ([4], "[data] buckets[0]=4 "),
    "word": ("4x4", '[data] buckets="4x4" must be a list, such as ["4x4"].'),
}


@pytest.mark.parametrize("case", BAD_BUCKETS)
def test_wrong_buckets_are_one_line(case, tmp_path):
    buckets, words = BAD_BUCKETS[case]
    root = write_set(tmp_path / "set", {(4, 8): 2, (4, 4): 2})
    said = refused(lambda: section_of(path=str(root), buckets=buckets).open())
    assert said.startswith(words.format(root))
    assert "\n" not in said


def test_buckets_of_several_datasets_or_of_no_shards_are_one_line(tmp_path):
    tables = [{"path": "a"}, {"path": "b"}]
    said = refused(lambda: section_of(datasets=tables, buckets=["4x4"]))
    assert said.startswith('[data] buckets=["4x4"] are of one path, but datasets is set.')
    (tmp_path / "0").mkdir()
    np.save(tmp_path / "0" / "a.npy", np.zeros((2, 4, 4), np.float32))
    said = refused(section_of(path=str(tmp_path), buckets=["4x4"]).survey)
    assert said.startswith(f'[data] buckets=["4x4"]: {tmp_path} holds no shards')


class Lengths(LatentShards):
    """A set of rows in two shapes that only knows the lengths of its captions."""

    copies, dtype = 1, torch.float16

    def __init__(self, lengths):
        self.lengths, third = lengths, len(lengths) // 3
        self.buckets = (
            LatentBucket((2, 4, 8), 0, third),
            LatentBucket((2, 4, 4), third, len(lengths) - third),
        )
        null = TextFacts.null_text(torch.zeros(1, 4))
        text = TextFacts(
            kind="", digest="", tokenizer="", layer=0, template="", width=4, tokens=9000, null=null
        )
        self.facts = LatentFacts(shape=(2, 4, 8), num_classes=1, count=len(lengths), text=text)

    def text_lengths(self):
        return self.lengths


@pytest.mark.parametrize(("most", "multiple"), [(512, 32), (9000, 8), (3, 32)])
def test_rows_keep_their_order_within_a_group_in_little_memory(most, multiple):
    lengths = np.random.default_rng(0).integers(0, most, 1_000_000).astype(np.uint16)
    given = Lengths(lengths)
    tracemalloc.start()
    source = TextGroups(given, multiple)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert source._rows.nbytes == 4 * len(lengths)
    assert peak < 12 * len(lengths)
    tokens = padded(lengths, 1, multiple)
    bucket = np.repeat([0, 1], [len(rows) for rows in given.bucket_rows])
    assert np.array_equal(source._rows, np.lexsort((tokens, bucket)))
    keys = np.stack((bucket, tokens), 1)
    wanted, counts = np.unique(keys, axis=0, return_counts=True)
    shapes = [given.buckets[number].shape for number in wanted[:, 0].tolist()]
    assert (source.shapes, source.text_tokens) == (shapes, wanted[:, 1].tolist())
    assert source.counts == counts.tolist()


def test_the_longest_captions_are_found_in_little_memory():
    draw = np.random.default_rng(0)
    counts = draw.integers(1, 4, 300_000)
    lengths = draw.integers(0, 500, counts.sum())
    numbers = draw.permutation(len(lengths)).astype(np.int32)
    files = np.split(lengths, [1000, 400_000])
    embeddings = CaptionEmbeddings.__new__(CaptionEmbeddings)
    embeddings.facts, embeddings.tokens = SimpleNamespace(is_online=False), 500
    embeddings._files = [SimpleNamespace(ends=each.cumsum()) for each in files]
    embeddings.file_ends = np.array([len(each) for each in files]).cumsum()
    embeddings._numbers, embeddings._ends = numbers, counts.cumsum()
    tracemalloc.start()
    found = embeddings.longest()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert np.array_equal(found, np.maximum.reduceat(lengths[numbers], counts.cumsum() - counts))
    assert peak < 12 * len(lengths)
    # Ends whose differences overflow are damage, too.
    embeddings._ends = embeddings._ends.copy()
    embeddings._ends[100_000] = np.iinfo(np.int64).min
    embeddings.path = Path("set")
    assert "does not give every picture a caption" in refused(embeddings.longest)


def test_a_dry_run_reads_no_shard_even_with_verify(folder, monkeypatch):
    section = section_of(path=f"{folder}/one", verify=True)
    monkeypatch.setattr(latents, "file_digest", lambda path: pytest.fail(f"{path} is read"))
    counts = section.bucket_counts(MULTIPLE)
    assert sum(counts.values()) == 44
    assert counts[(2, 4, 8), 12] == 6


def test_datasets_in_groups_and_one_without_captions(folder):
    section = section_of(
        datasets=[
            {"path": f"{folder}/one"},
            {"path": f"{folder}/other", "repeats": 3},
            {"path": f"{folder}/bare", "condition_dropout": 1},
        ]
    )
    source = section.open().in_text_groups(MULTIPLE)
    counts = dict(zip(source.bucket_names, map(len, source.bucket_rows), strict=True))
    assert counts["2x4x8, 12 text tokens"] == 6 + 3
    assert counts["2x4x4, 4 text tokens"] == 10 + 5  # The empty prompt has one token.
    rows = list(source.bucket_rows[list(counts).index("2x4x4, 4 text tokens")])
    found = source.read(rows)
    assert found["text"].shape == (15, 4, 4)
    bare = torch.tensor(numbers_of(found)) >= 200
    assert bare.sum() == 5
    assert (found["text"][bare, 0] == -1).all()
    order = source.order(0, (), "feistel", [4] * len(counts))
    assert order.num_rows == 44 + 3 * 6 + 5
    seen = Counter()
    for row in order.rows(range(order.samples_before(4))):
        seen[row] += 1
    assert set(seen) == set(range(55))
    # A dry run counts the same from the files alone.
    quick = section.bucket_counts(MULTIPLE)
    assert quick[(2, 4, 8), 12] == 6 + 3 * 3
    assert sum(quick.values()) == order.num_rows
    groups = source.groups()
    assert len(groups.unique()) == 6 + 2 + 1
    held_out = held_out_rows(source, 0, 9, "feistel")
    assert set(groups[list(held_out)].tolist()) == set(range(9))


def test_sets_without_captions_and_other_networks_are_as_they_were(folder):
    bare = LatentShards(folder / "bare")
    assert bare.in_text_groups(MULTIPLE) is bare
    facts = LatentShards(folder / "one").facts
    assert "bucket_text" not in facts.as_json()
    assert section_of(path=f"{folder}/bare").bucket_counts(MULTIPLE) == {}


def test_a_damaged_index_is_refused(folder):
    file = folder / "one" / "text-index.safetensors"
    tensors = load_file(file)
    tensors["captions"][3] = 4000
    save_file(tensors, file)
    said = refused(lambda: LatentShards(folder / "one").in_text_groups(MULTIPLE))
    assert said == (
        f"[data] {file}: does not give every picture a caption of at most 11 tokens. Restore the "
        "file, or repeat data encode --text-encoder."
    )
