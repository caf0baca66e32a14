"""Damaged keys and tensors of references, masks and features: each is refused in one line."""

import json

import pytest
import torch
from captioned_sets import write_beside, write_set
from refusals import refused
from safetensors.torch import load_file, save_file

from titan_dit.data.latents import LatentShards
from titan_dit.data.manifest import file_digest

NAMES = ("reference", "mask", "features")
MISSING = object()
WRONG_TABLES = (MISSING, None, False, 0, "", [], {}, "x", [1], {"a": 1})
WRONG_COUNTS = (MISSING, None, 0, -1, 1.5, "2", True, [2], 10**9)
KEYS = {
    # (table, key) -> values that are refused when the shards are opened.
    ("reference", "kind"): (MISSING, None, 1, "", "video", "first_frame", ["picture"]),
    ("reference", "channels"): (*WRONG_COUNTS, 1, 3, 4),
    ("mask", "mean"): (MISSING, None, 0, -1, 256, "127.5", True, [127.5], float("nan"), 1e300),
    ("features", "name"): (MISSING, None, 1, ["x"]),
    ("features", "digest"): (MISSING, None, 1),
    ("features", "grid"): (MISSING, None, 4, [2], [2, 2, 1], [4, 1], [1, 4], [0, 4], [2, -2], "22"),
    ("features", "dim"): (*WRONG_COUNTS, 2, 6),
}


@pytest.fixture
def folder(tmp_path):
    """Two buckets with references, masks and features."""
    return write_beside(write_set(tmp_path / "set", {(4, 4): 5, (4, 8): 3}), NAMES)


def damage(folder, change):
    """Change the manifest; `change` takes its values."""
    file = folder / "manifest.json"
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))


def put(table, key, value):
    """Replace a value, or delete its key."""
    if value is MISSING:
        del table[key]
    else:
        table[key] = value


def error_of(folder, verify=False):
    """The one line with which the shards are refused."""
    said = refused(lambda: LatentShards(folder, verify=verify))
    assert said.startswith("[data] ")
    assert str(folder) in said
    assert "\n" not in said
    return said


def test_every_damaged_key_of_the_manifest_is_refused_by_name(folder):
    file = folder / "manifest.json"
    valid = file.read_text()
    for name in NAMES:
        for value in WRONG_TABLES:
            damage(folder, lambda values, name=name, value=value: put(values, name, value))
            assert name in error_of(folder), (name, value)
            file.write_text(valid)
    for (name, key), wrong in KEYS.items():
        for value in wrong:
            damage(folder, lambda values, at=(name, key, value): put(values[at[0]], *at[1:]))
            assert name in error_of(folder), (name, key, value)
            file.write_text(valid)
    assert {*LatentShards(folder, verify=True).read([0])} >= {"reference", "mask"}


def test_a_wrong_mean_of_masks_is_found_by_verify(folder):
    damage(folder, lambda values: put(values["mask"], "mean", values["mask"]["mean"] / 2))
    assert "but the masks have" in error_of(folder, verify=True)


def test_tensors_of_another_form_are_refused_by_the_name_of_their_shard(folder):
    entry = json.loads((folder / "manifest.json").read_text())["shards"][1]
    shard = folder / entry["file"]
    valid = load_file(shard)
    for name in NAMES:
        tensor = valid[name]
        others = (
            tensor.float(),
            tensor[:-1] if len(tensor) > 1 else tensor.repeat(2, *[1] * (tensor.ndim - 1)),
            tensor[..., :-1].contiguous(),
            tensor.flatten(),
            tensor[None],
            torch.zeros(0, dtype=tensor.dtype),
            None,
        )
        for other in others:
            tensors = valid | {name: other}
            save_file({key: value for key, value in tensors.items() if value is not None}, shard)

            def signed(values):
                values["shards"][1] |= {
                    "bytes": shard.stat().st_size,
                    "sha256": file_digest(shard),
                }

            damage(folder, signed)
            for verify in (False, True):
                said = error_of(folder, verify)
                assert str(shard) in said, name
                assert name in said
