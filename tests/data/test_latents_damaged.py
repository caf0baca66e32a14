"""Damaged shards and manifests: each is refused with its file and what is wrong."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_shards import SECOND, write_ten

from titan_dit.config import schema
from titan_dit.config.section import UserError
from titan_dit.data import manifest
from titan_dit.data.latents import check_maps, file_digest
from titan_dit.data.sections import Latents


@pytest.fixture
def folder(tmp_path):
    return write_ten(tmp_path / "set")


def edit_manifest(folder, **changes):
    file = folder / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def refused(folder, verify=False):
    with pytest.raises(UserError) as caught:
        Latents(path=str(folder), verify=verify).open()
    message = str(caught.value)
    assert message.startswith("[data] ")
    return message


def test_a_missing_manifest_is_named(tmp_path):
    assert f"path={tmp_path}: no dataset found" in refused(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "{'format': 1}"])
def test_a_manifest_that_is_no_json_is_named(folder, text):
    (folder / "manifest.json").write_text(text)
    assert f"{folder / 'manifest.json'} is not valid JSON" in refused(folder)


def test_a_bucket_in_a_manifest_without_buckets_is_passed_over(folder):
    shards = json.loads((folder / "manifest.json").read_text())["shards"]
    edit_manifest(folder, shards=[shard | {"bucket": 5} for shard in shards])
    assert len(Latents(path=str(folder)).open().read([0])["label"]) == 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("../other/latents-00000.safetensors", '"../other/latents-00000.safetensors" is not the'),
        ("/etc/passwd", "is not the name of a file in the folder of the manifest"),
        ("", "is not the name of a file in the folder of the manifest"),
        ("a\x1b[31m", 'u001b[31m" is not the name of a file in the folder of the manifest'),
        (SECOND, f'shards has the file "{SECOND}" twice'),
    ],
)
def test_a_shard_elsewhere_or_twice_is_refused(folder, name, words):
    shards = json.loads((folder / "manifest.json").read_text())["shards"]
    shards[0]["file"] = name
    edit_manifest(folder, shards=shards)
    assert words in refused(folder)


@pytest.mark.parametrize("text", ['{"count": 1, "count": 2}', "[" * 200_000, "9" * 5000])
def test_json_that_python_refuses_in_other_ways_is_one_line(folder, text):
    (folder / "manifest.json").write_text(text)
    assert f"{folder / 'manifest.json'} is not valid JSON" in refused(folder)


def test_a_manifest_that_is_no_text_is_refused(folder):
    (folder / "manifest.json").write_bytes(b"\xff\xfe{}")
    assert "not valid JSON" in refused(folder)


@pytest.mark.parametrize("text", ["[]", "{}", '{"format": "titan_dit.latents/4"}', "3"])
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
        ({"shape": [1, 8]}, "must be [c, h, w]"),
        ({"scale": "x"}, 'scale="x" must be a number'),
        ({"scale": None}, "scale"),
        ({"scale": 0}, "scale=0"),
        ({"value_range": 3}, "value_range"),
        ({"value_range": [1]}, "must hold two numbers"),
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


def test_a_manifest_that_contradicts_itself_is_told_what_to_do(folder):
    edit_manifest(folder, count=9)
    message = refused(folder)
    assert "count=9, but its shards hold" in message
    assert message.endswith("Restore the manifest, or write the dataset again.")


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


@pytest.mark.parametrize("place", [100, -1, "label"])
def test_a_flipped_byte_is_found_when_verifying(folder, place):
    data = bytearray((folder / SECOND).read_bytes())
    # The labels are first; a flipped label is outside the classes, but a damaged file.
    data[8 + int.from_bytes(data[:8], "little") if place == "label" else place] ^= 64
    (folder / SECOND).write_bytes(data)
    if place == "label":
        assert "row 0 has label=" in refused(folder)
    assert f"{folder / SECOND}: its SHA-256 differs from" in refused(folder, verify=True)


def test_more_shards_than_a_process_can_map_are_refused(tmp_path):
    check_maps(tmp_path, 3)
    with pytest.raises(UserError, match=r"1,000,000,000 shards need as many mem"):
        check_maps(tmp_path, 10**9)


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


def test_a_manifest_may_be_as_large_as_its_folder_has_files(tmp_path, monkeypatch):
    (tmp_path / "manifest.json").write_text('{"format": "x"}'.ljust(9000))
    monkeypatch.setattr(schema, "LARGEST", 8000)
    with pytest.raises(UserError, match="4096 bytes for each file beside it, so no manifest"):
        manifest.read_json(tmp_path)
    for name in "ab":
        (tmp_path / name).touch()
    with pytest.raises(UserError, match="not a dataset"):
        manifest.read_json(tmp_path)
