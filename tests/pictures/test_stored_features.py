"""`data encode --features`: each row has the features of its own picture."""

import json
import pickle
import sys

import numpy as np
import pytest
import torch
from encoded_sets import CPU, encoded, save_pictures
from PIL import Image
from refusals import refused
from safetensors.torch import load_file, save_file
from tiny_vae import save_vae

from titan_dit.commands.flags import DataEncodeFlags
from titan_dit.data.latent_facts import FeatureFacts, LatentFacts
from titan_dit.data.latents import LatentShards
from titan_dit.data.manifest import MANIFEST, file_digest
from titan_dit.pictures.features import PictureFeatures, parse_grid

OWN = """
import torch

def squares(x):  # The mean colour of squares of two pixels.
    return x.float().unflatten(3, (4, 2)).unflatten(2, (4, 2)).mean((3, 5)).permute(0, 2, 3, 1)

def bright(x):  # Of some pictures not finite in float16.
    found = squares(x)
    return torch.where(found.mean((1, 2, 3), keepdim=True) > 128, found * 1e4, found)

class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Conv2d(3, 5, 2, 2)

    def forward(self, x):
        return self.layer(x.float()).permute(0, 2, 3, 1)

def flat(x):
    return squares(x).flatten(1)

def whole(x):
    return squares(x).to(torch.uint8)

def growing(x):
    return squares(x).repeat(1, 1, 1, len(x))

number = 3
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("features")
    save_vae(root / "vae")
    save_pictures(root / "in")
    (root / "own_squares.py").write_text(OWN)
    sys.path.insert(0, str(root))
    yield root
    sys.path.remove(str(root))
    sys.modules.pop("own_squares", None)


def network(name, grid=None):
    return PictureFeatures.load(f"own_squares:{name}", CPU, (8, 8), grid)


def squares_of(root):
    """The mean colours of every picture's and mirror image's squares, by numpy."""
    lines = (root / "in" / "metadata.jsonl").read_text().splitlines()
    names = [json.loads(line)["file_name"] for line in lines]
    pixels = np.stack([np.asarray(Image.open(root / "in" / name)) for name in names])
    both = np.stack([pixels, pixels[:, :, ::-1]], 1).reshape(-1, 4, 2, 4, 2, 3)
    return torch.from_numpy(both.mean((2, 4))).flatten(1, 2)


def test_rows_have_the_features_of_their_picture_and_its_mirror_image(root):
    plain, found = root / "plain", root / "set"
    encoded(root / "in", plain, str(root / "vae"), flip=True)
    encoded(root / "in", found, str(root / "vae"), flip=True, features=network("squares"))
    source = LatentShards(found, verify=True).with_features()
    wanted = squares_of(root)
    # In any order, across shards.
    rows = torch.randperm(24, generator=torch.Generator().manual_seed(0)).tolist()
    stored = source.read(rows)
    torch.testing.assert_close(stored["features"].double(), wanted[rows], atol=0.07, rtol=0)
    assert source.fields["features"].shape == (16, 3)
    assert torch.equal(source[7]["features"], source.read([7])["features"][0])
    # The latents are those of a set without features, and a run that does not ask reads none.
    assert torch.equal(stored["latent"], LatentShards(plain).read(rows)["latent"])
    assert LatentShards(found).read([0]).keys() == {"latent", "label"}
    again = pickle.loads(pickle.dumps(source))
    assert torch.equal(again.read(rows)["features"], stored["features"])
    facts = source.facts.features
    assert (facts.name, facts.grid, facts.dim) == ("own_squares:squares", (4, 4), 3)
    assert LatentFacts.from_json(json.loads(json.dumps(source.facts.as_json()))) == source.facts
    assert "features" not in LatentShards(found).facts.as_json()


def test_features_are_resampled_to_a_grid(root):
    found = network("squares", (2, 2)).of(torch.arange(192, dtype=torch.uint8).view(1, 3, 8, 8))
    assert found.shape == (1, 2, 2, 3)
    assert found.dtype == torch.float16
    # Wider than high, of a module, whose weights are its digest.
    wide = network("Network", (2, 3))
    assert wide.of(torch.zeros(2, 3, 8, 8, dtype=torch.uint8)).shape == (2, 2, 3, 5)
    assert wide.digest != network("squares").digest
    assert wide.entry["grid"] == [2, 3]
    same = network("squares").of(torch.full((1, 3, 8, 8), 77, dtype=torch.uint8))
    torch.testing.assert_close(
        network("squares", (6, 5)).of(torch.full((1, 3, 8, 8), 77, dtype=torch.uint8)),
        same[:, :1, :1].expand(1, 6, 5, 3).contiguous(),
    )


def test_pictures_whose_features_are_not_finite_are_dropped_with_their_latents(root):
    dropped = encoded(root / "in", root / "bright", str(root / "vae"), features=network("bright"))
    means = squares_of(root)[::2].mean((1, 2))
    assert [row for row, _ in dropped] == [i for i, mean in enumerate(means) if mean > 128]
    assert {why for _, why in dropped} == {"its features are not finite in float16"}
    kept = [i for i, mean in enumerate(means) if mean <= 128]
    found = LatentShards(root / "bright").with_features().read(range(len(kept)))["features"]
    torch.testing.assert_close(found.double(), squares_of(root)[::2][kept], atol=0.07, rtol=0)


WHERE = "[data encode] features own_squares"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("flat", f"{WHERE}:flat gave float32 [1, 48] for 1 pictures. It must give a floating"),
        ("whole", f"{WHERE}:whole gave uint8 [1, 4, 4, 3] for 1 pictures."),
        ("number", f"{WHERE}:number cannot be called."),
        ("nose", '[data encode] features="own_squares:nose": '),
    ],
)
def test_what_is_no_function_of_pictures_is_one_line(root, name, message):
    found = refused(lambda: network(name))
    assert found.startswith(message), found
    assert "\n" not in found


def test_features_that_change_their_size_are_one_line(root):
    pictures = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    message = refused(lambda: network("growing").of(pictures))
    assert message.startswith(f"{WHERE}:growing gave 6 elements of a feature, but 3 for the first")


@pytest.mark.parametrize("text", ["16", "0x4", "4x", "4x-1", "4 x 4", "4x100000", "٤x٤", ""])
def test_a_grid_that_is_none_is_one_line(text):
    message = refused(lambda: parse_grid(text))
    assert message.startswith(f"[data encode] features_grid={text}: give rows x columns")


def flags(**keys):
    return DataEncodeFlags(input="x", out="y", vae="z", **keys)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"image_size": 8, "features_grid": "4x4"}, "--features-grid without --features."),
        ({"pixels": 64, "features": "a:b"}, "--features are of pictures of one size."),
        ({"image_size": 8, "frames": "5", "features": "a:b"}, "--features are of pictures of one"),
    ],
)
def test_features_of_several_sizes_and_a_grid_of_none_are_one_line(keys, message):
    assert refused(lambda: flags(**keys).check_features()).startswith(f"[data encode] {message}")


def test_parse_grid_gives_rows_and_columns():
    assert parse_grid("2x30") == (2, 30)


def changed(root, folder, change):
    """A set whose first shard and manifest were changed, with a matching digest."""
    path = root / folder
    if not (path / MANIFEST).is_file():
        encoded(root / "in", path, str(root / "vae"), features=network("squares"))
    manifest = json.loads((path / MANIFEST).read_text())
    file = path / manifest["shards"][0]["file"]
    tensors = load_file(file)
    change(manifest, tensors)
    save_file(tensors, file)
    size, digest = file.stat().st_size, file_digest(file)
    manifest["shards"][0] |= {"bytes": size, "sha256": digest}
    (path / MANIFEST).write_text(json.dumps(manifest))
    return refused(lambda: LatentShards(path, verify=True).with_features())


def test_a_shard_with_other_features_than_the_manifest_says_is_one_line(root):
    message = changed(root, "a", lambda _, tensors: tensors.pop("features"))
    assert "not a readable shard" in message
    assert "features" in message

    def cut(_, tensors):
        tensors["features"] = tensors["features"][:, :2].contiguous()

    assert "holds features of torch.float16 [3, 2, 4, 3], but" in changed(root, "b", cut)

    def other(manifest, _):
        manifest["features"]["dim"] = "3"

    assert "features: dim" in changed(root, "c", other)
    message = changed(root, "d", lambda m, _: m["features"].update(grid=[4]))
    assert "grid must hold two numbers: rows and columns" in message


def test_data_without_features_is_one_line(root):
    encoded(root / "in", root / "none", str(root / "vae"))
    message = refused(lambda: LatentShards(root / "none").with_features())
    assert message == (
        "[repa] block is set, but [data] holds no features of its pictures. Store them: `python -m "
        "titan_dit data encode --features MODULE:FUNCTION`."
    )


def test_the_facts_of_features_in_a_record_are_checked():
    facts = FeatureFacts(name="a:b", digest="", grid=(4, 4), dim=3)
    values = LatentFacts(count=1, shape=(1, 8, 8), num_classes=1, features=facts).as_json()
    for key, wrong in (("grid", [4]), ("grid", [4, "4"]), ("dim", 0), ("name", 3)):
        bad = values | {"features": {**values["features"], key: wrong}}
        message = refused(lambda bad=bad: LatentFacts.from_json(bad))
        assert message.startswith(f"[checkpoint] its data: features {key}")
