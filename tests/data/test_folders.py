import itertools
import json
import pickle

import numpy as np
import pytest
import torch
from folders_of_files import class_folders, latents_of, pair, pictures, save
from refusals import refused

from titan_dit.data import loader
from titan_dit.data.base import Field, Source
from titan_dit.data.latent_facts import LatentFacts
from titan_dit.data.latents import LatentShards, write_shards
from titan_dit.data.order import BatchPlan, EpochOrder, RankOrder
from titan_dit.data.sections import Latents
from titan_dit.diffusion.objective import drawn_latents
from titan_dit.rng import SampleRNG

CPU = torch.device("cpu")


def open_folder(root, **keys):
    return Latents(path=str(root), **keys).open()


def batches(source, count, rank=0, ranks=1, cursor=0, workers=0, seed=5):
    order = RankOrder(BatchPlan(6), EpochOrder(seed, len(source)), rank, ranks)
    endless = loader.load(source, order, cursor, lambda fields: None, CPU, workers=workers)
    return list(itertools.islice(endless, count))


@pytest.mark.parametrize("suffix", [".npy", ".pt", ".safetensors"])
def test_a_folder_per_class_is_read_directly(tmp_path, suffix):
    latents, labels = class_folders(tmp_path, suffix)
    source = open_folder(tmp_path)
    assert source.facts.shape == (4, 8, 8)
    assert (source.facts.count, source.facts.num_classes) == (12, 3)
    rows = [11, 0, 5, 5, 3]
    samples = source.read(rows)
    assert torch.equal(samples["latent"], latents[rows])
    assert torch.equal(samples["label"], labels[rows])
    assert torch.equal(source[7]["latent"], latents[7])
    with pytest.raises(IndexError):
        source[12]


def test_files_of_pictures_are_clips_of_one_frame(tmp_path):
    latents, _ = class_folders(tmp_path)
    source = open_folder(tmp_path)
    clips = source.as_clips()
    assert clips.facts.shape == clips.fields["latent"].shape == (4, 1, 8, 8)
    assert source.facts.shape == (4, 8, 8)
    assert torch.equal(clips.read([11, 0])["latent"], latents[[11, 0]][:, :, None])
    assert torch.equal(clips[5]["latent"], latents[5][:, None])


def test_the_features_and_labels_of_fast_dit_are_read_directly(tmp_path):
    latents, labels = pair(tmp_path, "imagenet256_")
    samples = open_folder(tmp_path).read(range(12))
    assert torch.equal(samples["latent"], latents)
    assert torch.equal(samples["label"], labels)


def test_shards_and_a_folder_give_the_same_batches(tmp_path):
    latents, labels = class_folders(tmp_path / "folder")
    write_shards(
        tmp_path / "set", latents, labels, num_classes=3, source="test", scale=0.5, shift=0.1
    )
    sources = open_folder(tmp_path / "folder", scale=0.5, shift=0.1), open_folder(tmp_path / "set")
    many = [batches(source, 5, workers=2 * i) for i, source in enumerate(sources)]
    for batch, other in zip(*many, strict=True):
        for name in ("latent", "label"):
            assert torch.equal(batch.fields[name], other.fields[name])
        seen, again = (
            drawn_latents(b.fields["latent"], source.facts, 4, SampleRNG(5, b.sample_numbers))
            for b, source in zip((batch, other), sources, strict=True)
        )
        assert torch.equal(seen, again)
        assert seen.dtype == torch.float32


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
    assert source.read([0, 1])["latent"].dtype == torch.float16
    save(tmp_path / "0" / "3.npy", latents_of(1)[0])
    assert "3.npy: holds float32, but the first files hold float16" in refused(
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
    assert message.startswith(f"[data] {tmp_path / '0001' / '4.npy'}: empty file. Fix or replace")
    assert "\n" not in message
    (tmp_path / "0001" / "4.npy").unlink()
    assert "No such file" in refused(lambda: batches(source, 3, workers=workers))


def test_a_folder_of_pictures_is_to_be_packed_first(tmp_path):
    pictures(tmp_path)
    message = refused(lambda: open_folder(tmp_path))
    assert f"data pack --input {tmp_path} --out" in message


def test_sources_reopen_in_a_process_that_was_not_forked(tmp_path):
    latents, labels = class_folders(tmp_path / "folder")
    write_shards(tmp_path / "set", latents, labels, num_classes=3, source="test")
    for name in ("folder", "set"):
        sent = pickle.dumps(open_folder(tmp_path / name))
        assert len(sent) < 5000  # The paths, not the latents.
        assert torch.equal(pickle.loads(sent).read([4, 9])["latent"], latents[[4, 9]])


class Handmade(Source):
    """The minimal dataset of a user."""

    facts = LatentFacts(shape=(4, 8, 8), count=7, num_classes=3)
    fields = {"latent": Field(torch.float32, (4, 8, 8)), "label": Field(torch.int64, ())}

    def __getitem__(self, index):
        latent = torch.full((4, 8, 8), float(index))
        return {"latent": latent, "label": torch.tensor(index % 3)}


def test_a_dataset_of_a_users_own_needs_facts_fields_and_getitem_alone():
    (batch,) = batches(Handmade(), 1)
    rows = EpochOrder(5, 7).rows(range(6))
    assert batch.fields["latent"][:, 0, 0, 0].tolist() == rows
    assert batch.fields["label"].tolist() == [row % 3 for row in rows]


def test_a_record_of_facts_without_class_names_is_read():
    facts = LatentFacts(shape=(4, 8, 8), count=7, num_classes=2, class_names=("a", "b"))
    record = json.loads(json.dumps(facts.as_json()))
    assert LatentFacts.from_json(record) == facts
    del record["class_names"]
    assert LatentFacts.from_json(record).class_names == ()
