import json

import pytest
import torch
from folders_of_files import class_folders, files_in, latents_of, pair, pictures, save
from packed_folders import packed, spoil
from refusals import refused

from titan_dit.data.latents import LatentShards, write_shards
from titan_dit.data.listing import list_folder
from titan_dit.data.packing import pack
from titan_dit.data.packing.output import classes_without_samples


@pytest.mark.parametrize("suffix", [".npy", ".pt", ".safetensors"])
def test_class_folders_become_shards(tmp_path, suffix):
    latents, labels = class_folders(tmp_path / "in", suffix)
    how = {"scale": 0.5, "shift": 0.25, "text": "a vae"}
    assert packed(tmp_path / "in", tmp_path / "out", shard_size=5, **how) == []
    names = [f"out-0000{i}.safetensors" for i in range(3)]
    assert sorted(files_in(tmp_path / "out")) == ["manifest.json", *names, "sources.json"]
    source = LatentShards(tmp_path / "out", verify=True)
    assert source.manifest["source"] == "a vae"
    assert (source.facts.scale, source.facts.shift) == (0.5, 0.25)
    samples = source.read(range(12))
    assert torch.equal(samples["latent"], latents.half())
    assert torch.equal(samples["label"], labels)
    assert (tmp_path / "out" / names[0]).stat().st_mode & 0o444 == 0o444


def test_the_pair_of_fast_dit_becomes_shards_of_either_precision(tmp_path):
    latents, labels = pair(tmp_path / "in")
    packed(tmp_path / "in", tmp_path / "out", dtype="float32")
    samples = LatentShards(tmp_path / "out", verify=True).read(range(12))
    assert torch.equal(samples["latent"], latents)
    assert torch.equal(samples["label"], labels)


def test_names_of_classes_and_units_go_from_the_manifest_into_the_shards(tmp_path):
    class_folders(tmp_path / "in", classes=("b", "a"))
    manifest = {"format": "titan_dit.folder/1", "scale": 0.5, "source": "x", "classes": ["b", "a"]}
    (tmp_path / "in" / "manifest.json").write_text(json.dumps(manifest))
    packed(tmp_path / "in", tmp_path / "out")
    source = LatentShards(tmp_path / "out")
    assert source.facts.class_names == ("b", "a")
    assert (source.facts.scale, source.manifest["source"]) == (0.5, "x")
    assert "scale=0.1, but" in refused(lambda: packed(tmp_path / "in", tmp_path / "b", scale=0.1))


def test_a_part_of_the_classes_is_packed_for_a_model_of_all(tmp_path):
    class_folders(tmp_path / "in", classes=("0003", "0007"))
    packed(tmp_path / "in", tmp_path / "out", num_classes=1000)
    source = LatentShards(tmp_path / "out")
    assert source.facts.num_classes == 1000
    assert source.labels.unique().tolist() == [3, 7]


def test_bad_files_are_left_out_and_each_is_in_the_report(tmp_path):
    latents, labels = class_folders(tmp_path / "in", each=6)
    wanted = spoil(tmp_path / "in")
    plan = pack.make_job(tmp_path / "in", tmp_path / "out", shard_size=4)
    dropped = pack.pack(plan, tmp_path / "out", 1, lambda *_: None)
    report = json.loads((tmp_path / "out" / "dropped.json").read_text())
    assert {entry["file"]: entry["reason"] for entry in report} == wanted
    kept = [i for i in range(18) if i not in {row for row, _ in dropped}]
    assert len(kept) == 12
    samples = LatentShards(tmp_path / "out", verify=True).read(range(12))
    assert torch.equal(samples["latent"], latents[kept].half())
    assert torch.equal(samples["label"], labels[kept])
    assert classes_without_samples(plan, dropped) == []


def test_a_chunk_without_any_good_file_makes_no_shard_and_an_emptied_class_is_known(tmp_path):
    class_folders(tmp_path / "in")
    for i in range(4):
        save(tmp_path / "in" / "0001" / f"{i}.npy", torch.zeros(4, 4, 4))
    plan = pack.make_job(tmp_path / "in", tmp_path / "out", shard_size=4)
    dropped = pack.pack(plan, tmp_path / "out", 1, lambda *_: None)
    names = [entry["file"] for entry in LatentShards(tmp_path / "out").manifest["shards"]]
    assert names == ["out-00000.safetensors", "out-00002.safetensors"]
    assert classes_without_samples(plan, dropped) == [1]


def test_if_nothing_can_be_packed_nothing_is_left(tmp_path, monkeypatch):
    class_folders(tmp_path / "in")
    for path in (tmp_path / "in").rglob("*.npy"):
        path.write_bytes(b"x" * 50)
    message = refused(lambda: packed(tmp_path / "in", tmp_path / "out"))
    assert "none of 12 sampled files" in message
    assert f"{tmp_path / 'in' / '0000' / '0.npy'}: not a readable .npy file" in message
    # As if all sampled files had been good.
    monkeypatch.setattr(pack, "most_common_shape", lambda *_: (4, 8, 8))
    message = refused(lambda: packed(tmp_path / "in", tmp_path / "out", shard_size=5))
    assert "none of the 12 files can be packed, and nothing was written" in message
    assert not (tmp_path / "out").exists()


def test_the_shape_is_that_of_most_files(tmp_path):
    class_folders(tmp_path / "in")
    for i in range(3):
        save(tmp_path / "in" / "0000" / f"{i}.npy", torch.zeros(4, 4, 4))
    assert len(packed(tmp_path / "in", tmp_path / "out")) == 3


def test_inputs_that_cannot_be_opened_are_left_out(tmp_path):
    class_folders(tmp_path / "in")
    (tmp_path / "in" / "0001" / "2.npy").unlink()
    (tmp_path / "in" / "0001" / "2.npy").symlink_to(tmp_path / "gone.npy")
    assert packed(tmp_path / "in", tmp_path / "out") == [
        (6, "cannot be opened: No such file or directory")
    ]


def leftover(output):
    output.mkdir()
    (output / "pack.json").write_text('{"plan": "another"}')


def a_dataset(output):
    write_shards(output, latents_of(2), torch.zeros(2).long(), num_classes=1, source="test")


def unclaimed(output):
    output.mkdir()
    (output / "out-00000.safetensors").touch()


def a_users_file(output):
    output.mkdir()
    (output / "thesis.tex").touch()


def a_file(output):
    output.touch()


PLACES = {
    leftover: "holds unfinished shards of other files or options",
    a_dataset: "holds another dataset. Delete it or choose another --out",
    unclaimed: "holds shards of unknown origin, without a manifest.json",
    a_users_file: "is not empty: it holds thesis.tex",
    a_file: "is a file",
}


@pytest.mark.parametrize("make", PLACES)
def test_a_place_that_is_taken_is_refused_and_left_alone(tmp_path, make):
    class_folders(tmp_path / "in")
    make(tmp_path / "out")
    before = files_in(tmp_path)
    assert PLACES[make] in refused(lambda: packed(tmp_path / "in", tmp_path / "out"))
    assert files_in(tmp_path) == before


def test_shards_are_not_put_into_their_own_input(tmp_path):
    class_folders(tmp_path / "in")
    assert "inside the input" in refused(lambda: packed(tmp_path / "in", tmp_path / "in" / "out"))
    packed(tmp_path / "in", tmp_path / "out")
    assert "already packed" in refused(lambda: packed(tmp_path / "out", tmp_path / "again"))


def test_one_value_above_half_precision_is_enough_to_leave_a_file_out(tmp_path):
    class_folders(tmp_path / "in")
    large = latents_of(1)[0]
    large[1, 2, 3] = 1e5
    save(tmp_path / "in" / "0001" / "1.npy", large)
    ((row, reason),) = packed(tmp_path / "in", tmp_path / "out")
    assert (row, "not finite in float16" in reason) == (5, True)


def test_options_that_do_not_fit_the_input_are_refused(tmp_path):
    pictures(tmp_path / "pictures")
    class_folders(tmp_path / "latents")
    out = tmp_path / "out"
    assert "dtype=float16: images are stored as uint8" in refused(
        lambda: packed(tmp_path / "pictures", out, dtype="float16")
    )
    assert "image_size=16" in refused(lambda: packed(tmp_path / "latents", out, image_size=16))
    assert "num_classes=2, but there are 3" in refused(
        lambda: packed(tmp_path / "latents", out, num_classes=2)
    )


def test_a_plan_is_the_same_wherever_it_is_carried_out(tmp_path):
    for place in ("a", "b"):
        class_folders(tmp_path / place / "in")
    plans = [pack.make_job(tmp_path / p / "in", tmp_path / p / "out") for p in ("a", "b")]
    assert plans[0].digest == plans[1].digest
    other = pack.make_job(tmp_path / "a" / "in", tmp_path / "a" / "out", scale=0.5)
    assert other.digest != plans[0].digest
    assert list_folder(tmp_path / "a" / "in").names[0] == "0000/0.npy"
