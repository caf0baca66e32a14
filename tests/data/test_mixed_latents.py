"""Several datasets as one: whose rows, captions and rules come when, and what does not fit."""

import json
import math
import pickle
import random
from collections import Counter
from fractions import Fraction
from itertools import islice

import numpy as np
import pytest
import torch
from captioned_sets import ENCODER, WIDTH, write_set
from folders_of_files import class_folders, latents_of
from refusals import refused
from tiny import built, tiny_config
from tiny_joint import TABLES

from titan_dit.config import catalog, config_file
from titan_dit.config.section import UserError
from titan_dit.data.base import SampleOrder
from titan_dit.data.buckets import BucketOrder, BucketPlan, rows_and_sizes
from titan_dit.data.held_out import held_out_rows
from titan_dit.data.latent_facts import OF_THE_RUN, LatentFacts
from titan_dit.data.latents import LatentShards, write_shards
from titan_dit.data.mixed_order import MixedOrder, Part, rates
from titan_dit.data.order import RankOrder, steps_from
from titan_dit.data.sections import DatasetConfig, Latents
from titan_dit.opening import open_objective
from titan_dit.plan import resolve
from titan_dit.ranks import process_group
from titan_dit.validation.validation_set import check_alike, check_overlap, digests, shared_fields


def section_of(**table):
    """[data] as a config has it."""
    tables = {"data": {"name": "latents", **table}}
    return config_file.build_sections(tables, catalog.variant)["data"]


def opened(*datasets, **keys):
    tables = [{"path": str(path), **rule} for path, rule in datasets]
    return section_of(datasets=tables, **keys).open()


@pytest.fixture
def pair(tmp_path):
    """Rows 0 to 11 in two shapes, and rows 100 to 106 in one of them and another."""
    one = write_set(tmp_path / "one", {(2, 4): 8, (4, 4): 4}, lengths=(3, 5))
    other = write_set(tmp_path / "other", {(4, 4): 5, (4, 2): 2}, first=100, lengths=(2,), tokens=6)
    return one, other


def numbers_of(fields):
    return fields["latent"].flatten(1)[:, 0].int().tolist()


# ---- The order ----


def random_parts(seed):
    """(datasets in each bucket, samples of a step of each), with held-out rows."""
    draw = random.Random(seed)
    weights = [draw.choice([1, 2, 7, 10]) for _ in range(draw.randint(1, 4))]
    if seed % 2:
        weights = [Fraction(draw.randint(1, 30), draw.randint(1, 30)) for _ in weights]
    buckets = []
    for _ in range(draw.randint(1, 4)):
        own, first = [], 0
        for weight in draw.sample(weights, draw.randint(1, len(weights))):
            num = draw.randint(1, 40)
            out = tuple(sorted(draw.sample(range(num), draw.randint(0, num // 2))))
            own.append(Part(first, num, weight * (num - len(out)), out))
            first += num
        buckets.append(tuple(own))
    return buckets, [draw.randint(1, 24) for _ in buckets]


@pytest.mark.parametrize("seed", range(12))
def test_seen_and_waiting_rows_are_all_rows_as_often_as_their_dataset_says(seed):
    parts, batch_sizes = random_parts(seed)
    names = [str(number) for number in range(len(parts))]
    order, rounds = BucketOrder.mixed(seed, names, parts, batch_sizes), 6
    assert isinstance(order, SampleOrder)
    end, seen = order.samples_before(rounds), Counter()
    for step in steps_from(BucketPlan(order), 0):
        if step.numbers.start == end:
            break
        rows = order.rows(step.numbers)
        seen.update(rows)
        bucket = order.buckets[step.bucket]
        assert all(bucket.first <= row < bucket.first + bucket.num_rows for row in rows)
    for bucket, waiting in zip(order.buckets, order.waiting_before(rounds), strict=True):
        assert 0 <= waiting < bucket.batch_size
        total = 0
        for part in bucket.parts:
            first = bucket.first + part.first
            rows = [first + row for row in range(part.num_rows) if row not in part.held_out]
            own = [seen.pop(row, 0) for row in rows]
            total += sum(own)
            wanted = rounds * part.rate / len(rows)  # Of each row, but for what waits.
            assert max(own) <= math.ceil(wanted) + 1
            assert rounds * part.rate - sum(own) < waiting + 2 + len(bucket.parts)
        # Nothing is dropped: repeats x rows of all rounds have come, or wait.
        assert total + waiting == math.floor(rounds * bucket.samples)
    assert not seen, "rows held out, or of no bucket"


@pytest.mark.parametrize("seed", range(6))
def test_a_pass_has_every_row_as_often_as_its_dataset_repeats_it(seed):
    draw = random.Random(seed)
    sizes, repeats = draw.sample(range(1, 50), 3), draw.choices([1, 2, 10], k=3)
    firsts = np.cumsum([0, *sizes])
    zipped = zip(firsts.tolist(), sizes, repeats, strict=False)
    order = MixedOrder(seed, tuple(Part(first, num, num * k) for first, num, k in zipped))
    total = order.num_rows
    assert total == sum(num * k for num, k in zip(sizes, repeats, strict=True))
    for number in range(3):
        seen = Counter(order.rows(range(number * total, (number + 1) * total)))
        for first, num, k in zip(firsts.tolist(), sizes, repeats, strict=False):
            assert [seen[row] for row in range(first, first + num)] == [k] * num
    # In any order, and from a number alone.
    asked = draw.sample(range(3 * total), 40)
    assert order.rows(asked) == [order.rows([number])[0] for number in asked]
    assert order.rows(range(total)) != MixedOrder(seed + 1, order.parts).rows(range(total))


def test_weights_are_shares_of_the_samples_exactly():
    datasets = [DatasetConfig(path=str(w), weight=w) for w in (0.1, 0.2, 0.7)]
    sizes = [300, 4, 30]
    each = rates(datasets, sizes)
    assert [float(rate * size) for rate, size in zip(each, sizes, strict=True)] == [
        pytest.approx(334 * weight) for weight in (0.1, 0.2, 0.7)
    ]
    firsts = (0, 300, 304)
    zipped = zip(firsts, sizes, each, strict=True)
    order = MixedOrder(3, tuple(Part(first, n, rate * n) for first, n, rate in zipped))
    assert order.num_rows == 334
    rows = np.array(order.rows(range(3340)))
    counts = np.bincount(np.searchsorted(firsts, rows, side="right") - 1)
    assert counts.tolist() == [334, 668, 2338]  # Ten epochs: whole numbers of all.
    partly = np.bincount(np.searchsorted(firsts, rows[:1000], side="right") - 1)
    assert abs(partly / 1000 - [0.1, 0.2, 0.7]).max() < 0.04
    tiny = [DatasetConfig(path="a", weight=1e-9), DatasetConfig(path="b", weight=1.0)]
    rare, often = rates(tiny, [1, 10])
    order = MixedOrder(3, (Part(0, 1, rare), Part(1, 10, often * 10)))
    assert 0 not in order.rows(range(1000))


def test_repeats_and_weights_reach_the_order_and_the_epoch(pair):
    source = opened((pair[0], {"repeats": 2}), (pair[1], {"repeats": 10}))
    order = source.order(0, (), "feistel", [4, 4, 4])
    assert rows_and_sizes(order, 0) == [(16, 4), (2 * 4 + 10 * 5, 4), (20, 4)]
    assert order.num_rows == 2 * 12 + 10 * 7
    source = opened((pair[0], {"weight": 3}), (pair[1], {"weight": 1}))
    order = source.order(0, (), "feistel", [4, 4, 4])
    assert order.num_rows == 19
    # Three quarters of 19 samples over 12 rows, one quarter over 7.
    wide = Fraction(3, 4) * 19 * Fraction(8, 12)
    assert order.buckets[0].samples == wide
    rows = order.rows(range(order.samples_before(400)))
    of_other = sum(row in source.bucket_rows[2] for row in rows)
    of_other += sum(row >= 12 and row not in source.bucket_rows[2] for row in rows)
    assert of_other / len(rows) == pytest.approx(1 / 4, abs=0.002)


def test_all_ranks_take_the_samples_of_one_step(pair, monkeypatch):
    """A share is a part of the step's numbers: the rows do not depend on the ranks."""

    def share(rank, ranks):
        monkeypatch.setenv("RANK", str(rank))
        source = opened((pair[0], {"weight": 3}), (pair[1], {"weight": 1}))
        order = source.order(5, (), "feistel", [4, 6, 5])
        return list(islice(RankOrder(BucketPlan(order), order, rank, ranks).batches(0), 30))

    whole, *halves = share(0, 1), share(0, 2), share(1, 2)
    for wanted, *parts in zip(whole, *halves, strict=True):
        assert dict(pair for part in parts for pair in part) == dict(wanted)


# ---- The rows ----


def test_a_row_has_the_latent_and_the_caption_of_its_own_dataset(pair):
    source = opened((pair[0], {}), (pair[1], {"repeats": 3}))
    assert list(source.bucket_names) == ["2x2x4", "2x4x4", "2x4x2"]
    assert [len(rows) for rows in source.bucket_rows] == [8, 9, 2]
    assert source.facts.bucket_counts == (8, 9, 2)
    assert (source.facts.count, source.facts.text.tokens) == (19, 8)
    middle = list(source.bucket_rows[1])
    mixed = [middle[6], middle[1], middle[4], middle[0]]  # The two datasets alternate.
    for each in (source, pickle.loads(pickle.dumps(source))):
        found = each.read_numbered(mixed, [7, 8, 9, 10])
        assert numbers_of(found) == [102, 9, 100, 8]
        assert found["latent"].shape[1:] == (2, 4, 4)
        assert found["text"].shape == (4, 8, 4)
        lengths = found["text_length"].tolist()
        assert lengths == [2, 5, 2, 3]
        for row, length, number in zip(found["text"], lengths, numbers_of(found), strict=True):
            assert (row[:length] == number).all()
            assert not row[length:].any()
        assert each.captions([*mixed, 0]) == [f"row {n}, 0" for n in (102, 9, 100, 8, 0)]
        text = each.read_fields(("text", "text_length"), [*mixed, 0])  # Of two buckets.
        assert text["text"][:, 0, 0].tolist() == [102, 9, 100, 8, 0]
        assert each[middle[6]]["text_length"] == 2
    with pytest.raises(ValueError, match="rows of 2 buckets have no common shape"):
        source.read([0, middle[0]])
    with pytest.raises(IndexError, match="sample 19 of 19"):
        source.read([19])


def test_a_sample_number_draws_one_of_a_list_of_captions(tmp_path):
    one = write_set(tmp_path / "one", {(4, 4): 4}, lengths=((2, 3),))
    other = write_set(tmp_path / "other", {(4, 4): 4}, first=100)
    source = opened((one, {}), (other, {}))
    drawn = source.read_numbered([1] * 40, list(range(40)))["text"][:, 0, 0].tolist()
    assert set(drawn) == {1.0, 1001.0}
    assert drawn == source.read_numbered([1] * 40, list(range(40)))["text"][:, 0, 0].tolist()
    [shown] = source.captions([1])
    assert (source.read([1])["text"][0, 0, 0].item() > 999) == shown.endswith(", 1")


def test_one_dataset_that_changes_nothing_is_what_path_opens(pair):
    plain, alone = Latents(path=str(pair[0])).open(), opened((pair[0], {}))
    assert isinstance(alone, LatentShards)
    assert alone.facts.as_json() == plain.facts.as_json()
    assert "repeats" not in plain.facts.as_json()
    repeated = opened((pair[0], {"repeats": 5}))
    assert repeated.order(0, (), "feistel", [4, 4]).num_rows == 60


def test_facts_go_to_a_checkpoint_and_back_and_change_with_every_rule(pair):
    def facts(*rules):
        return opened(*zip(pair, rules, strict=True)).facts

    first = facts({"repeats": 2}, {"condition_dropout": 0.5})
    again = LatentFacts.from_json(json.loads(json.dumps(first.as_json())))
    assert again == first
    assert (again.repeats, again.condition_dropouts) == ((2, 1), (None, 0.5))
    others = [
        facts({"repeats": 3}, {"condition_dropout": 0.5}),
        facts({"repeats": 2}, {}),
        facts({"weight": 2}, {"weight": 1}),
        facts({"weight": 4}, {"weight": 2}),
        opened((pair[1], {}), (pair[0], {"repeats": 2})).facts,
    ]
    assert len({each.digest for each in (first, *others)}) == 6


def test_rows_are_held_out_of_every_bucket_of_every_dataset(pair):
    source = opened((pair[0], {"repeats": 2}), (pair[1], {}))
    held_out = held_out_rows(source, 3, 8, "feistel")
    groups = source.groups()
    assert Counter(groups.tolist()) == {0: 8, 1: 4, 2: 5, 3: 2}
    assert set(groups[list(held_out)].tolist()) == {0, 1, 2, 3}
    order = source.order(3, held_out, "feistel", [4, 4, 4])
    assert not set(order.rows(range(order.samples_before(9)))) & set(held_out)
    taken = Counter(groups[list(held_out)].tolist())
    assert order.num_rows == 2 * (12 - taken[0] - taken[1]) + 7 - taken[2] - taken[3]
    lines = list(source.lines(order))
    # In proportion: 8 of 19 rows.
    assert taken == {0: 3, 1: 2, 2: 2, 3: 1}
    for line, path, rows, often in zip(lines, pair, ((12, 7), (7, 4)), (2, 1), strict=True):
        whole, left = rows
        assert line.startswith(
            f"dataset {path}: {whole} rows, of which {left} are trained on, {often} times an epoch"
        )
    said = refused(lambda: held_out_rows(source, 3, 16, "feistel"))
    assert said.endswith("stays in training, so at most 15 rows can be held out. Set fewer.")


def test_a_dataset_has_its_own_dropout_and_one_without_captions_the_empty_prompt(pair, tmp_path):
    bare = write_set(tmp_path / "bare", {(4, 4): 3}, first=200, encoder=None)
    source = opened((pair[0], {}), (bare, {"condition_dropout": 1}))
    assert "condition_dropout" in source.fields
    rows = [source.bucket_rows[1][0], source.bucket_rows[1][5]]
    found = source.read(rows)
    assert numbers_of(found) == [8, 201]
    assert found["condition_dropout"][0] == OF_THE_RUN
    assert found["condition_dropout"][1] == 1
    assert found["text_length"].tolist() == [3, 1]
    assert (found["text"][1, 0] == -1).all()
    assert not found["text"][1, 1:].any()
    assert source.captions(rows) == ["row 8, 0", ""]
    source.check_holds(("latent", "text", "text_length"))
    source = opened((pair[0], {}), (bare, {"condition_dropout": 0.9}))
    source.check_holds(("latent", "label"))  # A network that takes classes needs no captions.
    said = refused(lambda: source.check_holds(("latent", "text", "text_length")))
    assert said == (
        f"[data] datasets: {bare} holds no embeddings of captions, but others do. Encode them by "
        "`data encode --text-encoder`, or train it on the empty prompt: condition_dropout = 1."
    )


def test_only_a_network_that_takes_captions_refuses_a_set_without_them(tmp_path):
    captioned = write_set(tmp_path / "captioned", {(4, 4): 6}, num_classes=10)
    bare = write_set(tmp_path / "bare", {(4, 4): 5}, first=50, encoder=None, num_classes=10)
    data = {"name": "latents", "datasets": [{"path": str(captioned)}, {"path": str(bare)}]}
    model = {"latent_size": 4, "in_channels": 2, "num_classes": 10}
    config = tiny_config(data=data, model=model)
    source = config.data.open()
    open_objective(config, resolve(config, 1), source)
    assert source.read([0, 7])["label"].tolist() == [0, 1]
    size = {"latent_size": [4, 4], "text_dim": WIDTH}
    config = built(TABLES | {"data": data}, {"model": size})
    said = refused(lambda: open_objective(config, resolve(config, 1), config.data.open()))
    assert said.startswith(f"[data] datasets: {bare} holds no embeddings of captions, but others")


def test_datasets_of_one_shape_and_classes_are_one_order(tmp_path):
    """Without captions and buckets: the fields and the groups of a class-conditional run."""
    for name, first in (("a", 0), ("b", 50)):
        write_shards(
            tmp_path / name,
            latents_of(10) + first,
            torch.arange(10) % 2,
            num_classes=2,
            source="test",
        )
    source = opened((tmp_path / "a", {"repeats": 3}), (tmp_path / "b", {}), verify=True)
    assert source.facts.bucket_shapes == ()
    assert source.fields.keys() == {"latent", "label"}
    order = source.order(0, (0, 12), "feistel")
    assert isinstance(order, MixedOrder)
    seen = Counter(order.rows(range(order.num_rows)))
    assert [seen[row] for row in range(20)] == [0, *[3] * 9, 1, 1, 0, *[1] * 7]
    assert next(source.lines(order)).endswith(
        "/a: 10 rows, of which 9 are trained on, 3 times an epoch: 75.0% of the samples"
    )


def test_a_folder_of_files_may_be_a_dataset_beside_shards(tmp_path):
    latents, labels = class_folders(tmp_path / "files", classes=("0", "1"), shape=(4, 8, 8))
    write_shards(
        tmp_path / "shards", latents_of(6, seed=9), torch.arange(6) % 2, num_classes=2, source="t"
    )
    source = opened((tmp_path / "files", {"repeats": 2}), (tmp_path / "shards", {}))
    found = source.read([9, 0, 13, 5])
    assert torch.equal(found["latent"][1], latents[0])
    assert torch.equal(found["latent"][3], latents[5])
    assert found["label"].tolist() == [1, 0, 1, labels[5]]
    assert source.order(0, (), "feistel").num_rows == 2 * 8 + 6
    assert section_of(path=str(tmp_path / "files")).bucket_counts() == {}


def test_pictures_beside_clips_are_clips_of_one_frame(tmp_path):
    pictures = write_set(tmp_path / "pictures", {(2, 4): 5, (4, 4): 3})
    clips = write_set(tmp_path / "clips", {(1, 2, 4): 4, (3, 2, 4): 8}, first=100, lengths=(2,))
    source = opened((pictures, {"weight": 1}), (clips, {"weight": 3}))
    assert source.bucket_names == ["2x1x2x4", "2x1x4x4", "2x3x2x4"]
    assert source.facts.shape == (2, 3, 2, 4)
    assert source.facts.bucket_counts == (5 + 4, 3, 8)
    found = source.read([0, 8, 4])
    assert found["latent"].shape == (3, 2, 1, 2, 4)
    assert numbers_of(found) == [0, 103, 4]
    assert found["text"][:, 0, 0].tolist() == [0, 103, 4]
    again = pickle.loads(pickle.dumps(source))
    assert numbers_of(again.read([12, 19])) == [104, 111]
    # Of 20 samples of an epoch 5 are pictures and 15 clips, as the files alone say, too.
    order = source.order(0, (), "feistel", [2, 1, 4])
    shares = [float(bucket.samples) for bucket in order.buckets]
    assert shares == [25 / 8 + 5, 15 / 8, 10]
    tables = [{"path": str(pictures), "weight": 1}, {"path": str(clips), "weight": 3}]
    counts = section_of(datasets=tables).bucket_counts()
    assert counts == {((2, 1, 2, 4), 0): 8, ((2, 1, 4, 4), 0): 2, ((2, 3, 2, 4), 0): 10}


@pytest.mark.parametrize(("other", "warns"), [(30.0, True), (16.0, False), (None, False)])
def test_clips_of_two_rates_are_one_warning(other, warns, tmp_path):
    rates = [{"fps": rate} if rate else {} for rate in (16.0, other)]
    sets = [
        write_set(tmp_path / f"{n}", {(3, 2, 4): 4 + n}, first=100 * n, **rates[n]) for n in (0, 1)
    ]
    source = opened(*((folder, {}) for folder in sets))
    lines = list(source.lines(source.order(0, (), "feistel", [4])))
    assert lines[2:] == warns * [
        f"warning: [data] datasets: clips of {sets[0]} have 16 frames per second, those of "
        f"{sets[1]} 30, so motion has two speeds. Encode both with the same --fps."
    ]


def test_the_largest_samples_are_known_from_the_manifests_alone(pair, tmp_path):
    clips = write_set(tmp_path / "clips", {(3, 2, 4): 1, (1, 8, 2): 2}, first=100)
    for shard in tmp_path.glob("*/*.safetensors"):
        shard.unlink()
    assert section_of(path=str(pair[0])).sample_shape() == (2, 4, 4)
    tables = [{"path": str(pair[1])}, {"path": str(clips)}]
    assert section_of(datasets=tables).sample_shape() == (2, 3, 2, 4)
    class_folders(tmp_path / "files", classes=("0", "1"), shape=(4, 8, 8))
    assert section_of(path=str(tmp_path / "files")).sample_shape() is None
    assert section_of(datasets=[*tables, {"path": f"{tmp_path}/files"}]).sample_shape() is None
    assert section_of(path=str(tmp_path / "gone")).sample_shape() is None


def test_an_autoencoder_of_clips_may_have_encoded_the_pictures_beside_them(tmp_path):
    vae = {"class": "AutoencoderKLWan", "source": "vae", "digest": "d" * 64, "factor": 8}
    pictures = write_set(tmp_path / "pictures", {(2, 4): 5}, vae=vae)
    clips = write_set(tmp_path / "clips", {(3, 2, 4): 8}, first=9, vae={**vae, "frames_factor": 4})
    source = opened((pictures, {}), (clips, {}))
    assert source.facts.vae.frames_factor == 4
    other = write_set(tmp_path / "other", {(5, 2, 4): 8}, first=30, vae=vae)
    said = refused(lambda: opened((other, {}), (clips, {})))
    assert f"vae=AutoencoderKLWan {'d' * 12}, but" in said
    assert f"vae=AutoencoderKLWan {'d' * 12}, frames_factor 4. A network's" in said


def test_wider_values_are_kept_and_classes_of_other_meaning_left_out(pair, tmp_path):
    other = write_set(tmp_path / "third", {(4, 4): 2}, first=7, num_classes=5)
    source = opened((pair[0], {}), (other, {}))
    assert (source.facts.num_classes, source.facts.class_names) == (1, ())
    assert source.read(list(source.bucket_rows[1]))["label"].unique().tolist() == [0]
    wide = tmp_path / "wide"
    write_shards(wide, torch.rand(3, 2, 4, 4), torch.zeros(3).long(), num_classes=1, source="t")
    narrow = tmp_path / "narrow"
    write_shards(
        narrow, torch.rand(3, 2, 4, 4).half(), torch.zeros(3).long(), num_classes=1, source="t"
    )
    found = opened((narrow, {}), (wide, {})).read([0, 4])["latent"]
    assert found.dtype == torch.float32
    assert torch.equal(found[0], LatentShards(narrow).read([0])["latent"][0].float())
    assert torch.equal(found[1], LatentShards(wide).read([1])["latent"][0])


def test_manifests_alone_count_the_samples_of_every_bucket(pair):
    def counts(*rules):
        tables = [{"path": str(path), **rule} for path, rule in zip(pair, rules, strict=True)]
        return section_of(datasets=tables).bucket_counts()

    assert counts({"repeats": 2}, {"repeats": 10}) == {
        ((2, 2, 4), 0): 16,
        ((2, 4, 4), 0): 58,
        ((2, 4, 2), 0): 20,
    }
    assert counts({"weight": 3}, {"weight": 1}) == {
        ((2, 2, 4), 0): 10,
        ((2, 4, 4), 0): 8,
        ((2, 4, 2), 0): 1,
    }
    assert Latents(path=str(pair[0])).bucket_counts() == {((2, 2, 4), 0): 8, ((2, 4, 4), 0): 4}
    tables = [{"path": str(pair[0])}, {"path": "gone"}]
    assert section_of(datasets=tables).bucket_counts() == {}


# ---- A validation set beside them ----


def test_a_validation_set_may_have_shorter_captions_and_no_row_of_any_dataset(pair, tmp_path):
    source = opened((pair[0], {"condition_dropout": 0.2}), (pair[1], {}))
    other = Latents(path=str(write_set(tmp_path / "v", {(4, 2): 3}, first=300, tokens=5))).open()
    check_alike("[validation]", other, source)
    with process_group.start("cpu") as world:
        check_overlap("v", other, range(3), source, world)
        # The rows of a dataset are found in the mixture, though its captions are padded otherwise.
        part = Latents(path=str(pair[1])).open()
        said = refused(lambda: check_overlap("other", part, range(7), source, world))
    assert said.startswith("[validation] path=other: 7 of its 7 samples are also in [data]")
    names = shared_fields(other, source)
    assert names == ["label", "latent", "text_length"]
    assert len(set(digests(part, range(7), names))) == 7
    longer = Latents(path=str(write_set(tmp_path / "l", {(4, 2): 3}, tokens=9))).open()
    assert "Give a dataset of the same kind" in refused(
        lambda: check_alike("[validation]", longer, source)
    )


# ---- What does not fit ----


def test_keys_that_do_not_fit_are_one_line(pair):
    tables = [{"path": "a"}, {"path": "b"}]
    cases = {
        "[data] path and datasets are missing. Set one of them: --data.path FOLDER": {},
        "[data] path and datasets are both set. Keep one": {"path": "a", "datasets": tables},
        "[data] datasets[1] weight=0.0 must be above 0": {
            "datasets": [{"path": "a", "weight": 1}, {"path": "b", "weight": 0}]
        },
        "[data] datasets: a has no weight, but others have.": {
            "datasets": [{"path": "a"}, {"path": "b", "weight": 1}]
        },
        "[data] datasets: a has weight=2.0 and repeats=3. Keep one of them.": {
            "datasets": [{"path": "a", "weight": 2, "repeats": 3}]
        },
        "[data] datasets[0] repeats=0 must be at least 1": {
            "datasets": [{"path": "a", "repeats": 0}]
        },
        "[data] datasets[0] condition_dropout=1.5 must be at most 1": {
            "datasets": [{"path": "a", "condition_dropout": 1.5}]
        },
        "[data] datasets[0] num_repeats: unknown key. Did you mean repeats?": {
            "datasets": [{"path": "a", "num_repeats": 3}]
        },
        "[data] datasets[0] path is missing": {"datasets": [{"repeats": 3}]},
        '[data] datasets[1] path="" is empty. Set it to a dataset folder.': {
            "datasets": [{"path": "a"}, {"path": ""}]
        },
    }
    for line, keys in cases.items():
        said = refused(lambda keys=keys: section_of(**keys))
        assert said.startswith(line), said
        assert "\n" not in said


def misfit(tmp_path, pair, **keys):
    text = {key: keys.pop(key) for key in ("encoder", "first") if key in keys}
    other = write_set(tmp_path / "bad", {(4, 4): 2}, **{"first": 70, **text}, **keys)
    said = refused(lambda: opened((pair[0], {}), (other, {})))
    assert str(pair[0]) in said
    assert str(other) in said
    assert "\n" not in said
    return said


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"scale": 0.5}, "has scale=1.0, but"),
        ({"value_range": [0, 255]}, "has value_range=None, but"),
        (
            {"vae": {"class": "AutoencoderKL", "source": "v", "digest": "e" * 64, "factor": 8}},
            "has vae=None, but",
        ),
        ({"encoder": {**ENCODER, "digest": "f" * 64}}, "captions by a text encoder with digest="),
        ({"encoder": {**ENCODER, "layer": 3}}, "captions by a text encoder with layer=2, but"),
        ({"encoder": {**ENCODER, "template": "a {}"}}, "captions by a text encoder with template="),
        ({"encoder": {**ENCODER, "tokenizer": "x"}}, "captions by a text encoder with tokenizer="),
    ],
)
def test_datasets_of_another_meaning_are_refused_by_both_folders(keys, words, tmp_path, pair):
    assert words in misfit(tmp_path, pair, **keys)


def test_the_same_rows_twice_and_other_classes_are_refused(tmp_path, pair):
    said = refused(lambda: opened((pair[0], {}), (pair[0], {"repeats": 2})))
    assert said == (
        f"[data] datasets: {pair[0]} and {pair[0]} hold the same data. Name it once, with repeats "
        "or a weight."
    )
    for name, classes in (("two", 2), ("three", 3)):
        labels = torch.arange(6) % classes
        write_shards(
            tmp_path / name, latents_of(6) + classes, labels, num_classes=classes, source="test"
        )
    said = refused(lambda: opened((tmp_path / "two", {}), (tmp_path / "three", {})))
    assert "two 2 classes, " in said
    assert "three 3 classes. Labels must mean the same in all" in said
    deep = write_set(tmp_path / "deep", {(4, 4): 2}, first=9, copies=2)
    source = opened((pair[0], {}), (deep, {}))
    words = r"deep has 2 rows of each picture .* held out together, but .*one has 1\. Set"
    with pytest.raises(UserError, match=words):
        held_out_rows(source, 0, 4, "feistel")
    deeper = write_set(tmp_path / "deeper", {(4, 4): 4}, first=20, copies=4)
    source = opened((deep, {}), (deeper, {}))
    with pytest.raises(UserError, match=r"deeper has 4 rows .* but .*deep has 2\. Set"):
        held_out_rows(source, 0, 4, "feistel")
