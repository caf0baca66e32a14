"""Feature networks: what they see, and what is said if one is missing."""

import io
import sys
import zipfile

import numpy as np
import pytest
import torch
from held_pictures import held
from PIL import Image

from titan_dit.config.section import UserError
from titan_dit.scores import features, pictures, score

CPU = torch.device("cpu")
OWN = """
import torch

def ratios(x):
    return x.float().mean((2, 3))

class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 4)

    def forward(self, x):
        found = x.float().mean((2, 3)) / 255
        return found, self.layer(found)

def twice(x):
    found = ratios(x)
    return found, found

def wrong(x):
    return x.float()

def paired(x):
    return ratios(x), None

def unit(x):
    found = ratios(x)
    return found / found.norm(dim=1, keepdim=True), found

def listed(x):
    return [ratios(x)]

def short(x):
    return ratios(x), ratios(x)[:1]

def three(x):
    return ratios(x), ratios(x), ratios(x)

def spoiled(x):
    return ratios(x) / 0
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_features.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("own_features", None)


def test_functions_and_modules_of_the_user(own):
    batch = torch.zeros(2, 4, 4, 3, dtype=torch.uint8)
    batch[1, ..., 0] = 255  # Red.
    found, logits = features.load("own_features:ratios", "", CPU)(batch)
    assert found.tolist() == [[0, 0, 0], [255, 0, 0]]
    assert logits is None
    assert features.load("own_features:paired", "", CPU)(batch)[1] is None
    network = features.load("own_features:Network", "", CPU)
    assert network(batch)[1].shape == (2, 4)
    assert len(network.digest) == 64
    wrong = {
        "wrong": r"wrong gave \[2, 3, 4, 4\] for 2 pictures\. It must give a tensor \(2, d\)",
        "listed": "listed gave list for 2",
        "short": r"short gave \[2, 3\], \[1, 3\] for 2",
        "three": r"three gave \[2, 3\], \[2, 3\], \[2, 3\] for 2",
        "spoiled": "spoiled gave NaN or infinity for some of 2 pictures",
    }
    for name, message in wrong.items():
        with pytest.raises(UserError, match=f"^--features own_features:{message}"):
            features.load(f"own_features:{name}", "", CPU)(batch)
    with pytest.raises(UserError, match=r"no such features. Give inception, efficientnet"):
        features.load("resnet", "", CPU)


def test_features_may_be_their_own_class_scores(own):
    network = features.load("own_features:twice", "", CPU)
    rows = torch.randint(0, 256, (70, 4, 4, 3), dtype=torch.uint8)
    found = score.compute_statistics(network, held([rows], "rows"), ["is", "kid"])
    assert torch.equal(found.features, found.logits)
    score.check_network(network, ["is"], 4, "--metrics is")
    # Of a black picture these are NaN.
    score.check_network(features.load("own_features:unit", "", CPU), ["is"], 4, "--metrics is")
    with pytest.raises(UserError, match=r"^--metrics is: is needs class scores, which own_fe.*not"):
        score.check_network(
            features.load("own_features:ratios", "", CPU), ["is"], 4, "--metrics is"
        )


def test_efficientnet_is_trained(tmp_path):
    """It tells apart what a random network does not: real pictures, and the same ones blurred."""
    folder = held([examples()], "examples")
    network = features.load("efficientnet:64", "", CPU)
    whole = folder.read(range(folder.count))
    half = len(whole) // 2
    blurred = torch.nn.functional.interpolate(
        whole[:half].permute(0, 3, 1, 2).float(), scale_factor=1 / 8, mode="area"
    )
    blurred = torch.nn.functional.interpolate(blurred, size=64, mode="bilinear")
    kinds = {
        "real": whole[half:],
        "blurred": blurred.clamp(0, 255).byte().permute(0, 2, 3, 1),
    }
    first = network(whole[:half])[0]
    away = {name: score.kernel_distance(first, network(rows)[0])[0] for name, rows in kinds.items()}
    assert abs(away["real"]) * 5 < away["blurred"], away


def examples():
    """Some of the example pictures, without those of equal looks."""
    from titan_dit.commands.data_example import SOURCE
    from titan_dit.pictures import output

    found = [np.asarray(picture) for _, picture in output.read_sheet(SOURCE / "pictures")]
    return torch.from_numpy(np.stack(found[:: len(found) // 120][:120]))


def test_weights_of_inception_come_from_a_file(tmp_path):
    with pytest.raises(UserError, match="needs its weights: download https"):
        features.load("inception", "", CPU)
    file = tmp_path / "weights.pth"
    torch.save({"other": torch.zeros(2)}, file)
    with pytest.raises(UserError, match="does not hold Inception's weights"):
        features.load("inception", str(file), CPU)
    with pytest.raises(UserError, match=r"\[fid\] feature_weights .* does not hold"):
        features.load("inception", str(file), CPU, "[fid] features")


@pytest.mark.long
def test_inception_is_torch_fidelitys(tmp_path):
    """Random weights, the same pictures: the features and the distance of its own extractor."""
    module = features.fidelity("feature_extractor_inceptionv3", "test")
    torch.manual_seed(0)
    empty = module.FeatureExtractorInceptionV3.__new__(module.FeatureExtractorInceptionV3)
    loads = torch.nn.Module.load_state_dict
    try:  # It loads weights as it is built: these are its own random ones.
        torch.nn.Module.load_state_dict = lambda self, tensors: None
        file = io.BytesIO()
        torch.save({}, file)
        file.seek(0)
        empty.__init__("inception-v3-compat", ["2048"], feature_extractor_weights_path=file)
    finally:
        torch.nn.Module.load_state_dict = loads
    path = tmp_path / "weights.pth"
    torch.save(empty.state_dict(), path)
    network = features.load("inception", str(path), CPU)
    batch = torch.randint(0, 256, (4, 40, 40, 3), dtype=torch.uint8)
    (expected,) = empty(batch.permute(0, 3, 1, 2))
    found, logits = network(batch)
    assert torch.equal(found, expected)
    assert logits.shape == (4, 1008)


def test_pictures_are_read_alike_from_a_folder_and_from_archives(tmp_path):
    rows = torch.randint(0, 256, (5, 6, 6, 3), dtype=torch.uint8).numpy()
    (tmp_path / "folder" / "b").mkdir(parents=True)
    for number, row in enumerate(rows):
        Image.fromarray(row).save(tmp_path / "folder" / "b" / f"{number}.png")
    np.savez(tmp_path / "stored.npz", arr_0=rows, arr_1=np.arange(5))
    np.savez_compressed(tmp_path / "packed.npz", arr_0=rows)
    folder = pictures.open_folder(tmp_path / "folder", 6, "--reference")
    stored, packed = (
        pictures.open_npz(tmp_path / name, "--reference") for name in ("stored.npz", "packed.npz")
    )
    for found in (folder, stored, packed):
        assert torch.equal(found.read(range(1, 4)), torch.from_numpy(rows[1:4]))
    assert stored.digest() == packed.digest()
    assert isinstance(pictures.array_of(tmp_path / "stored.npz", ""), np.memmap)


def test_bad_pictures_are_one_line(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UserError, match="holds no pictures"):
        pictures.open_folder(empty, 8, "--reference")
    (empty / "a.png").write_bytes(b"")
    with pytest.raises(UserError, match=r"--reference: .*a.png: .*"):
        pictures.open_folder(empty, 8, "--reference").read(range(1))
    np.savez(tmp_path / "floats.npz", arr_0=np.zeros((2, 4, 4, 3)))
    with pytest.raises(UserError, match=r"arr_0 is float64 \[2, 4, 4, 3\], not uint8"):
        pictures.open_npz(tmp_path / "floats.npz", "--samples")
    with zipfile.ZipFile(tmp_path / "other.npz", "w") as archive:
        archive.writestr("x.npy", b"")
    with pytest.raises(UserError, match="holds x, but no arr_0"):
        pictures.open_npz(tmp_path / "other.npz", "--samples")
    (tmp_path / "text.npz").write_text("no archive")
    with pytest.raises(UserError, match=r"is not a .npz file"):
        pictures.open_npz(tmp_path / "text.npz", "--samples")
