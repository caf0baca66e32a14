import itertools
import json
import pickle

import numpy as np
import pytest
import torch
from folders_of_files import class_folders, latents_of, pair, pictures, save

from titan_dit.data import loader
from titan_dit.data.base import DataFacts, Sample, Source, check_fits
from titan_dit.data.latents import Latents, LatentShards, write_shards
from titan_dit.data.order import BatchPlan, EpochOrder, RankOrder
from titan_dit.diffusion.units import check_std, scale_hint, to_model_units
from titan_dit.models.dit import DiTConfig
from titan_dit.rng import SampleRNG
from titan_dit.section import UserError

CPU = torch.device("cpu")
MODEL = DiTConfig(hidden=8, layers=1, heads=1, patch=2, latent_size=8, channels=4, num_classes=3)


def open_folder(root, **keys):
    return Latents(path=str(root), **keys).open()


def batches(source, count, rank=0, ranks=1, cursor=0, workers=0, seed=5):
    order = RankOrder(BatchPlan(6), EpochOrder(seed, len(source)), rank, ranks)
    endless = loader.load(source, order, cursor, MODEL, CPU, seed=seed, workers=workers)
    return list(itertools.islice(endless, count))


def refused(action):
    with pytest.raises(UserError) as caught:
        action()
    return str(caught.value)


@pytest.mark.parametrize("suffix", [".npy", ".pt", ".safetensors"])
def test_a_folder_per_class_is_read_directly(tmp_path, suffix):
    latents, labels = class_folders(tmp_path, suffix)
    source = open_folder(tmp_path)
    assert source.facts.shape == (4, 8, 8)
    assert (source.facts.count, source.facts.num_classes) == (12, 3)
    rows = [11, 0, 5, 5, 3]
    samples = source.read(rows)
    assert torch.equal(samples.latents, latents[rows])
    assert torch.equal(samples.labels, labels[rows])
    assert torch.equal(source[7].latent, latents[7])
    with pytest.raises(IndexError):
        source[12]


def test_the_features_and_labels_of_fast_dit_are_read_directly(tmp_path):
    latents, labels = pair(tmp_path, "imagenet256_")
    samples = open_folder(tmp_path).read(range(12))
    assert torch.equal(samples.latents, latents)
    assert torch.equal(samples.labels, labels)


def test_shards_and_a_folder_give_the_same_batches(tmp_path):
    latents, labels = class_folders(tmp_path / "folder")
    write_shards(
        tmp_path / "set", latents, labels, num_classes=3, source="test", scale=0.5, shift=0.1
    )
    folder = open_folder(tmp_path / "folder", scale=0.5, shift=0.1)
    for a, b in zip(
        batches(folder, 5, workers=2), batches(open_folder(tmp_path / "set"), 5), strict=True
    ):
        assert torch.equal(a.tokens, b.tokens)
        assert torch.equal(a.labels, b.labels)
        assert a.tokens.dtype == torch.float32


@pytest.mark.parametrize("where", ["config", "manifest"])
def test_scale_and_shift_come_from_the_config_or_the_manifest(tmp_path, where):
    class_folders(tmp_path)
    keys = {"scale": 0.25, "shift": -1.5}
    if where == "manifest":
        text = json.dumps({"format": "titan_dit.folder/1", "source": "a vae"} | keys)
        (tmp_path / "manifest.json").write_text(text)
        assert refused(lambda: open_folder(tmp_path, scale=0.5)) == (
            f"[data] scale=0.5, but {tmp_path / 'manifest.json'} says scale=0.25. Remove the key "
            "from [data], or correct the manifest."
        )
        open_folder(tmp_path, **keys)
        keys = {}
    facts = open_folder(tmp_path, **keys).facts
    assert (facts.scale, facts.shift) == (0.25, -1.5)


def test_a_config_that_disagrees_with_shards_is_refused(tmp_path):
    latents, labels = latents_of(4), torch.zeros(4).long()
    write_shards(tmp_path, latents, labels, num_classes=1, source="test", scale=0.18215)
    assert open_folder(tmp_path, scale=0.18215, shift=0.0).facts.scale == 0.18215
    message = refused(lambda: open_folder(tmp_path, scale=0.13025))
    assert "scale=0.13025, but" in message
    assert "says scale=0.18215" in message
    assert "shift=1.0, but" in refused(lambda: open_folder(tmp_path, shift=1.0))


def test_another_scale_is_another_dataset(tmp_path):
    class_folders(tmp_path / "a")
    digests = {open_folder(tmp_path / "a", scale=scale).facts.digest for scale in (None, 1.0, 0.5)}
    assert len(digests) == 2
    for scale in (1.0, 0.5):
        labels = torch.zeros(4).long()
        write_shards(
            tmp_path / f"{scale}", latents_of(4), labels, num_classes=1, source="", scale=scale
        )
    a, b = (LatentShards(tmp_path / name).facts.digest for name in ("1.0", "0.5"))
    assert a != b


def test_the_digest_of_a_folder_is_of_its_names_and_labels(tmp_path):
    class_folders(tmp_path / "a")
    class_folders(tmp_path / "b")
    digest = open_folder(tmp_path / "a").facts.digest
    assert open_folder(tmp_path / "b").facts.digest == digest
    (tmp_path / "b" / "0001" / "2.npy").rename(tmp_path / "b" / "0001" / "22.npy")
    assert open_folder(tmp_path / "b").facts.digest != digest


def test_a_folder_is_verified_by_reading_every_file(tmp_path):
    class_folders(tmp_path, each=6)
    assert len(open_folder(tmp_path, verify=True)) == 18
    (tmp_path / "0001" / "4.npy").write_bytes(b"")
    open_folder(tmp_path)
    assert "0001/4.npy: empty file" in refused(lambda: open_folder(tmp_path, verify=True))


def test_other_labels_of_the_same_files_are_another_dataset(tmp_path):
    pair(tmp_path)
    digest = open_folder(tmp_path).facts.digest
    np.save(tmp_path / "labels" / "5.npy", np.array([1]))
    assert open_folder(tmp_path).facts.digest != digest


def test_a_shift_that_disagrees_with_the_folder_is_refused(tmp_path):
    class_folders(tmp_path)
    text = json.dumps({"format": "titan_dit.folder/1", "shift": 0.5})
    (tmp_path / "manifest.json").write_text(text)
    assert "shift=0.25, but" in refused(lambda: open_folder(tmp_path, shift=0.25))


def test_half_precision_stays_half_until_the_device(tmp_path):
    for i in range(4):
        save(tmp_path / "0" / f"{i}.npy", latents_of(1)[0].half())
    source = open_folder(tmp_path)
    assert source.read([0, 1]).latents.dtype == torch.float16
    save(tmp_path / "0" / "3.npy", latents_of(1)[0])
    assert "3.npy: holds float32 where the first files hold float16" in refused(
        lambda: source.read([3])
    )


def test_mixed_shapes_are_found_at_the_start_between_classes_and_later_within(tmp_path):
    class_folders(tmp_path, each=6)
    source = open_folder(tmp_path)
    save(tmp_path / "0001" / "4.npy", torch.zeros(4, 8, 4))
    message = refused(lambda: source.read([10]))
    assert "0001/4.npy: shape [4, 8, 4], not [4, 8, 8]" in message
    assert "data pack" in message
    save(tmp_path / "0002" / "0.npy", torch.zeros(4, 4, 4))
    message = refused(lambda: open_folder(tmp_path))
    assert "0002/0.npy: shape [4, 4, 4], but" in message
    assert "0000/0.npy has [4, 8, 8]" in message


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_file_is_one_error_from_whichever_process_reads_it(tmp_path, workers):
    class_folders(tmp_path, each=6)
    source = open_folder(tmp_path)
    (tmp_path / "0001" / "4.npy").write_bytes(b"")
    message = refused(lambda: batches(source, 3, workers=workers))
    assert message.startswith(f"[data] {tmp_path / '0001' / '4.npy'}: empty file. Mend or replace")
    assert "\n" not in message
    (tmp_path / "0001" / "4.npy").unlink()
    assert "No such file" in refused(lambda: batches(source, 3, workers=workers))


def test_a_folder_of_pictures_is_to_be_packed_first(tmp_path):
    pictures(tmp_path)
    message = refused(lambda: open_folder(tmp_path))
    assert f"data pack --input {tmp_path} --output" in message


def test_sources_reopen_in_a_process_that_was_not_forked(tmp_path):
    latents, labels = class_folders(tmp_path / "folder")
    write_shards(tmp_path / "set", latents, labels, num_classes=3, source="test")
    for name in ("folder", "set"):
        sent = pickle.dumps(open_folder(tmp_path / name))
        assert len(sent) < 5000  # The paths, not the latents.
        assert torch.equal(pickle.loads(sent).read([4, 9]).latents, latents[[4, 9]])


class Handmade(Source):
    """All that a user's dataset has to be."""

    facts = DataFacts(shape=(4, 8, 8), count=7, num_classes=3)

    def __getitem__(self, index):
        return Sample(torch.full((4, 8, 8), float(index)), index % 3)


def test_a_dataset_of_a_users_own_needs_facts_and_getitem_alone():
    (batch,) = batches(Handmade(), 1)
    rows = EpochOrder(5, 7).rows(range(6))
    assert MODEL.detokenize(batch.tokens)[:, 0, 0, 0].tolist() == rows
    assert batch.labels.tolist() == [row % 3 for row in rows]


def mean_and_std(root, mean=2.0, std=0.5, count=12):
    """Every latent with this mean and std."""
    latent = torch.cat([torch.full((4, 8, 8), mean), torch.full((4, 8, 8), std)])
    for i in range(count):
        save(root / f"{i % 3}" / f"{i}.npy", latent)


def test_a_mean_and_a_std_are_drawn_from_and_then_scaled(tmp_path):
    mean_and_std(tmp_path)
    source = open_folder(tmp_path, scale=0.5, shift=1.0)
    check_fits(source.facts, MODEL.sample_shape, 3)
    drawn = torch.cat([MODEL.detokenize(batch.tokens) for batch in batches(source, 20)])
    assert drawn.shape == (120, 4, 8, 8)
    assert drawn.mean().item() == pytest.approx((2.0 - 1.0) * 0.5, abs=0.01)
    assert drawn.std().item() == pytest.approx(0.5 * 0.5, abs=0.01)
    noise = SampleRNG(5, torch.arange(120)).normal("latent", (4, 8, 8))
    torch.testing.assert_close(drawn, (2.0 + 0.5 * noise - 1.0) * 0.5)


def test_the_draw_is_the_same_on_every_layout_and_fresh_in_every_epoch(tmp_path):
    mean_and_std(tmp_path)
    source = open_folder(tmp_path)
    whole = batches(source, 4)
    shares = [batches(source, 4, rank, 2, workers=rank) for rank in range(2)]
    for step, batch in enumerate(whole):
        parts = torch.cat([share[step].tokens for share in shares])
        assert torch.equal(parts, batch.tokens)
    assert torch.equal(batches(source, 2, cursor=12)[0].tokens, whole[2].tokens)
    # All stored latents are alike and 12 make an epoch: what differs is the draw.
    drawn = torch.cat([batch.tokens for batch in whole])
    assert len(drawn.unique(dim=0)) == 24


def test_a_std_below_zero_is_a_log_variance(tmp_path):
    mean_and_std(tmp_path)
    source = open_folder(tmp_path)
    logvar = torch.cat([torch.zeros(4, 8, 8), torch.full((4, 8, 8), -3.0)])
    for path in tmp_path.rglob("*.npy"):
        np.save(path, logvar.numpy())
    message = refused(lambda: batches(source, 1, workers=1))
    assert "8 channels where [model] has channels=4" in message
    assert "a mean and a log variance?" in message
    check_std(torch.zeros(1, 8, 8, 8), source.facts, 4)  # A std of exactly 0 is one.
    check_std(logvar[None], source.facts, 8)  # A model of 8 channels may have any values.


@pytest.mark.parametrize(("std", "words"), [(5.4, "is it missing?"), (0.2, "scaled twice?")])
def test_latents_far_from_unit_std_get_a_hint(tmp_path, std, words):
    latents, labels = latents_of(64) * std, torch.zeros(64).long()
    write_shards(tmp_path / "a", latents, labels, num_classes=1, source="test")
    hint = scale_hint(LatentShards(tmp_path / "a"), 4)
    assert hint.startswith(f"hint    64 samples have a std of {std:.1f}")
    assert "0.18215" in hint
    assert words in hint
    write_shards(tmp_path / "b", latents, labels, num_classes=1, source="test", scale=1 / std)
    assert scale_hint(LatentShards(tmp_path / "b"), 4) is None


def test_whole_numbers_become_the_units_of_the_model():
    facts = DataFacts(
        shape=(3, 2, 2), count=1, num_classes=1, scale=1 / 127.5, shift=127.5, value_range=(0, 255)
    )
    stored = torch.tensor([0, 255]).byte().view(2, 1, 1, 1).expand(2, 3, 2, 2)
    seen = to_model_units(stored, facts, 3, SampleRNG(0, torch.arange(2)))
    assert seen.flatten(1).unique(dim=1).flatten().tolist() == [-1, 1]
    torch.testing.assert_close(facts.to_stored_units(seen), stored.float(), rtol=0, atol=1e-4)


def test_a_record_of_facts_without_class_names_is_read():
    facts = DataFacts(shape=(4, 8, 8), count=7, num_classes=2, class_names=("a", "b"))
    record = json.loads(json.dumps(facts.as_json()))
    assert DataFacts.from_json(record) == facts
    del record["class_names"]
    assert DataFacts.from_json(record).class_names == ()
