import json
import pickle
import shutil

import pytest
import torch
from folders_of_files import files_in
from safetensors.torch import load_file, save_file

from titan_dit.config.section import UserError
from titan_dit.data.latent_facts import LatentFacts
from titan_dit.data.latents import Digits, Latents, LatentShards, file_digest, write_shards
from titan_dit.data.synthetic import Synthetic
from titan_dit.diffusion.objective import to_model_units
from titan_dit.rng import SampleRNG


def latents_of(dtype, count=10):
    torch.manual_seed(0)
    if dtype == torch.uint8:
        return torch.randint(0, 256, (count, 2, 3, 3), dtype=dtype)
    return torch.randn(count, 2, 3, 3).to(dtype)


@pytest.fixture
def folder(tmp_path):
    """Ten samples of four classes in three shards."""
    write_shards(
        tmp_path / "set",
        latents_of(torch.float16),
        torch.arange(10) % 4,
        num_classes=4,
        source="a test",
        shard_size=4,
    )
    return tmp_path / "set"


def edit_manifest(folder, **changes):
    file = folder / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def refused(folder, verify=False):
    with pytest.raises(UserError) as caught:
        Latents(path=str(folder), verify=verify).open()
    message = str(caught.value)
    assert message.startswith("[data] ")
    return message


def test_the_digits_are_those_of_scikit_learn():
    datasets = pytest.importorskip("sklearn.datasets")
    pixels, labels = datasets.load_digits(return_X_y=True)
    digits = Digits().open()
    assert len(digits) == digits.facts.count == 1797
    assert digits.facts.shape == (1, 8, 8)
    assert digits.facts.num_classes == 10
    assert digits.facts.value_range == (-1, 1)
    samples = [digits[i] for i in range(1797)]
    drawn = torch.stack([sample["latent"] for sample in samples])
    assert drawn.dtype == torch.float16
    assert torch.equal(drawn.double().flatten(1), torch.from_numpy(pixels / 8 - 1))
    assert [sample["label"] for sample in samples] == labels.tolist()
    assert (drawn.min(), drawn.max()) == (-1, 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.uint8])
@pytest.mark.parametrize(("scale", "shift"), [(1.0, 0.0), (0.18215, 0.5)])
def test_what_is_written_is_read(tmp_path, dtype, scale, shift):
    latents, labels = latents_of(dtype), torch.arange(10) % 4
    write_shards(
        tmp_path / "set",
        latents,
        labels,
        num_classes=4,
        source="a test",
        scale=scale,
        shift=shift,
        value_range=(0.0, 255.0),
        shard_size=4,
    )
    source = LatentShards(tmp_path / "set", verify=True)
    assert len(source) == 10
    assert len(source.shards) == 3
    assert source.facts.value_range == (0, 255)
    for row in (9, 0, 4, 3, 8, 7, 5, 1, 2, 6, 0):
        sample = source[row]
        assert sample["latent"].dtype == dtype
        assert torch.equal(sample["latent"], latents[row])
        assert sample["label"] == labels[row]
    rows = [9, 0, 4, 3, 8, 7, 5, 1, 2, 6, 0]
    samples = source.read(rows)
    assert torch.equal(samples["latent"], latents[rows])
    assert torch.equal(samples["label"], labels[rows])
    seen = to_model_units(
        source.read(range(10))["latent"], source.facts, 2, SampleRNG(0, torch.arange(10))
    )
    expected = (latents.double() - shift) * scale
    torch.testing.assert_close(seen.double(), expected, rtol=1e-6, atol=1e-6)
    back = source.facts.to_stored_units(seen)
    # Clamped to value_range.
    torch.testing.assert_close(back, latents.float().clamp(0, 255), rtol=1e-5, atol=1e-4)


def test_the_digest_tells_datasets_apart_but_not_their_places(folder, tmp_path):
    moved = tmp_path / "elsewhere"
    shutil.copytree(folder, moved)
    assert LatentShards(moved).facts == LatentShards(folder).facts
    shutil.rmtree(moved)
    write_shards(
        moved, latents_of(torch.float16) + 1, torch.arange(10) % 4, num_classes=4, source="b"
    )
    assert LatentShards(moved).facts.digest != LatentShards(folder).facts.digest


def test_a_dataset_that_is_there_is_not_overwritten(folder):
    before = files_in(folder)
    with pytest.raises(UserError, match=r"set already holds a dataset.*Delete the folder, or"):
        write_shards(
            folder, latents_of(torch.uint8), torch.zeros(10).long(), num_classes=1, source=""
        )
    assert files_in(folder) == before
    # Without a manifest it is no dataset: files of an unfinished write are overwritten.
    (folder / "manifest.json").unlink()
    write_shards(folder, latents_of(torch.uint8), torch.zeros(10).long(), num_classes=1, source="")
    assert len(LatentShards(folder)) == 10


def test_a_missing_manifest_is_named(tmp_path):
    assert f"path={tmp_path}: no dataset found" in refused(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "{'format': 1}"])
def test_a_manifest_that_is_no_json_is_named(folder, text):
    (folder / "manifest.json").write_text(text)
    assert f"{folder / 'manifest.json'} is not valid JSON" in refused(folder)


@pytest.mark.parametrize("text", ["[]", "{}", '{"format": "titan_dit.latents/2"}', "3"])
def test_a_manifest_of_another_format_is_named(folder, text):
    (folder / "manifest.json").write_text(text)
    assert "manifest.json" in refused(folder)
    assert "titan_dit.latents/1" in refused(folder)


def test_a_manifest_without_its_keys_names_them(folder):
    file = folder / "manifest.json"
    manifest = json.loads(file.read_text())
    del manifest["scale"], manifest["num_classes"]
    file.write_text(json.dumps(manifest))
    assert f"{file}: num_classes, scale missing" in refused(folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "int8"}, 'dtype="int8" is not one of'),
        ({"dtype": ["uint8"]}, "dtype"),
        ({"count": 11}, "count=11, but its shards hold 10"),
        ({"count": 0, "shards": []}, "count=0 must be at least 1"),
        ({"count": 1, "shards": []}, "count=1, but its shards hold 0"),
        ({"shape": None}, "shape"),
        ({"shape": [1, 8]}, "shape must be [c, h, w]"),
        ({"scale": "x"}, 'scale="x" must be a number'),
        ({"scale": None}, "scale"),
        ({"scale": 0}, "scale=0"),
        ({"value_range": 3}, "value_range"),
        ({"value_range": [1]}, "value_range must hold two"),
        ({"num_classes": "a"}, 'num_classes="a"'),
        ({"shards": None}, "shards"),
        ({"shards": [3]}, "shards[0]"),
        ({"shards": [{"file": "a", "count": 10, "sha256": ""}]}, "shards[0]: bytes missing"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(folder, changes, words):
    edit_manifest(folder, **changes)
    message = refused(folder)
    assert "manifest.json" in message
    assert words in message


SECOND = "set-00001.safetensors"


def test_a_manifest_that_is_no_text_is_refused(folder):
    (folder / "manifest.json").write_bytes(b"\xff\xfe{}")
    assert "not valid JSON" in refused(folder)


def test_a_dtype_that_could_not_be_read_back_is_not_written(tmp_path):
    with pytest.raises(UserError, match="float64"):
        write_shards(
            tmp_path / "set",
            torch.zeros(2, 1, 8, 8, dtype=torch.float64),
            torch.zeros(2, dtype=torch.int64),
            num_classes=1,
            source="test",
        )
    assert not (tmp_path / "set").exists()


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (torch.zeros(9).long(), r"label is torch.int64 \[9\], not int64 \[10\]"),
        (torch.zeros(10), r"label is torch.float32 \[10\]"),
        (torch.zeros(10).int(), r"label is torch.int32"),
        (torch.arange(10), r"row 4 has label=4, outside 0 to 3"),
        (torch.full((10,), -1), r"row 0 has label=-1"),
    ],
)
def test_labels_that_could_not_be_opened_are_not_written(tmp_path, labels, words):
    with pytest.raises(UserError, match=words):
        write_shards(
            tmp_path / "set", latents_of(torch.float16), labels, num_classes=4, source="test"
        )
    assert not (tmp_path / "set").exists()


def test_no_samples_are_no_dataset(tmp_path):
    with pytest.raises(UserError, match="hold no sample"):
        write_shards(
            tmp_path / "set",
            latents_of(torch.float16)[:0],
            torch.zeros(0).long(),
            num_classes=4,
            source="test",
        )
    assert not (tmp_path / "set").exists()


def test_a_changed_sample_leaves_the_dataset_alone(tmp_path):
    latents = torch.arange(64.0).view(1, 1, 8, 8)
    write_shards(tmp_path, latents, torch.zeros(1, dtype=torch.int64), num_classes=1, source="test")
    opened = LatentShards(tmp_path)
    opened[0]["latent"].zero_()
    assert torch.equal(opened[0]["latent"], latents[0])
    with pytest.raises(IndexError):
        opened[-1]
    with pytest.raises(IndexError):
        opened[1]


def test_a_missing_shard_is_named(folder):
    (folder / SECOND).unlink()
    assert f"{folder / SECOND}: the shard is missing" in refused(folder)


@pytest.mark.parametrize("change", [-1, 1])
def test_a_shard_of_another_length_is_named(folder, change):
    data = (folder / SECOND).read_bytes()
    (folder / SECOND).write_bytes(data[:-1] if change < 0 else data + b"\0")
    message = refused(folder)
    assert str(folder / SECOND) in message
    assert f"{len(data) + change:,} bytes, but the manifest says {len(data):,}" in message


@pytest.mark.parametrize("place", [100, -1])
def test_a_flipped_byte_is_found_when_verifying(folder, place):
    data = bytearray((folder / SECOND).read_bytes())
    data[place] ^= 1
    (folder / SECOND).write_bytes(data)
    assert f"{folder / SECOND}: its SHA-256 differs from" in refused(folder, verify=True)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_latents_that_are_not_finite_are_not_written(tmp_path, bad):
    latents = latents_of(torch.float16)
    latents[6, 1, 2, 0] = bad
    with pytest.raises(UserError, match="row 6 holds NaN or infinity"):
        write_shards(tmp_path / "x", latents, torch.zeros(10).long(), num_classes=1, source="test")
    assert not (tmp_path / "x").exists()


def test_the_digits_are_always_verified(tmp_path, monkeypatch):
    from titan_dit.data import latents

    shutil.copytree(latents.Path(latents.__file__).parent / "digits", tmp_path / "digits")
    monkeypatch.setattr(latents, "__file__", str(tmp_path / "latents.py"))
    assert len(Digits().open()) == 1797
    shard = tmp_path / "digits" / "digits-00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(UserError, match="SHA-256"):
        Digits().open()


def test_a_shard_that_is_no_safetensors_file_is_named(folder):
    size = (folder / SECOND).stat().st_size
    (folder / SECOND).write_bytes(b"\xff" * size)
    assert f"{folder / SECOND}: not a readable shard" in refused(folder)


def rewrite_shard(folder, **tensors):
    """Replace tensors of the second shard, with a matching manifest."""
    file = folder / SECOND
    save_file(load_file(file) | tensors, file)
    shards = json.loads((folder / "manifest.json").read_text())["shards"]
    shards[1] |= {"bytes": file.stat().st_size, "sha256": file_digest(file)}
    edit_manifest(folder, shards=shards)


@pytest.mark.parametrize("label", [-1, 4, 1000])
def test_a_label_outside_the_classes_is_named_with_its_row(folder, label):
    rewrite_shard(folder, label=torch.tensor([0, 3, label, 99]))
    message = refused(folder)
    assert f"{folder / SECOND}: row 2 has label={label}, outside 0 to 3" in message
    assert "num_classes=4" in message


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"latent": torch.zeros(4, 2, 3, 3)}, "holds torch.float32 [4, 2, 3, 3], but the"),
        ({"latent": torch.zeros(4, 2, 3, 2).half()}, "[4, 2, 3, 2], but the manifest says"),
        ({"latent": torch.zeros(5, 2, 3, 3).half()}, "[5, 2, 3, 3], but"),
        ({"label": torch.zeros(4, dtype=torch.int32)}, "label is torch.int32 [4], not int64 [4]"),
        ({"label": torch.zeros(3, dtype=torch.int64)}, "label is torch.int64 [3], not int64 [4]"),
    ],
)
def test_a_shard_of_another_dtype_or_shape_is_named(folder, tensors, words):
    rewrite_shard(folder, **tensors)
    message = refused(folder)
    assert str(folder / SECOND) in message
    assert words in message


def test_a_shard_without_labels_is_named(folder):
    file = folder / SECOND
    save_file({"latent": load_file(file)["latent"]}, file)
    shards = json.loads((folder / "manifest.json").read_text())["shards"]
    shards[1] |= {"bytes": file.stat().st_size}
    edit_manifest(folder, shards=shards)
    assert f"{file}: not a readable shard" in refused(folder)


def test_everyone_may_read_what_is_written(folder):
    assert (folder / SECOND).stat().st_mode & 0o444 == 0o444


def test_facts_survive_json():
    facts = LatentShards(Digits().open().path).facts
    for kept in (facts, LatentFacts(shape=(4, 32, 32), count=7, num_classes=1000, scale=0.18215)):
        assert LatentFacts.from_json(json.loads(json.dumps(kept.as_json()))) == kept


def test_synthetic_samples_are_a_function_of_their_index():
    config = Synthetic(latent_size=8, channels=4, num_classes=3, count=50)
    source, again = config.open(), pickle.loads(pickle.dumps(config.open()))
    drawn = torch.stack([source[i]["latent"] for i in range(50)])
    assert drawn.shape == (50, 4, 8, 8)
    assert len(source) == 50
    assert torch.equal(again[49]["latent"], drawn[49])
    assert again[49]["label"] == 49 % 3
    assert abs(drawn.mean().item()) < 0.03
    assert drawn.std().item() == pytest.approx(1, abs=0.03)
    assert not torch.equal(drawn[0], drawn[1])
