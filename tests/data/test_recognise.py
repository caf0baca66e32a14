"""Paths that hold no dataset: one line with what they hold, what is supported, and the page."""

import subprocess
import sys

import pytest
import torch
from folders_of_files import class_folders, pictures, save

from titan_dit import __main__
from titan_dit.config.section import UserError
from titan_dit.data.listing import list_folder
from titan_dit.data.sections import Latents

FORMATS = "Supported: a folder per class of latents (.npy, .pt, .safetensors)"


def files(*names):
    def make(root):
        for name in names:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(b"x")

    return make


def splits(root):
    pictures(root / "train")
    pictures(root / "val")


PATHS = {
    "a diffusers pipeline": (
        files("model_index.json", "unet/config.json", "vae/diffusion_pytorch_model.safetensors"),
        "a diffusers model",
    ),
    "a part of one": (files("config.json", "diffusion_pytorch_model.bin"), "a diffusers model"),
    "webdataset": (files("00000.tar", "00001.tar"), "of pictures `data encode` makes a dataset"),
    "parquet": (files("train-00000.parquet"), "a table: not supported yet; of pictures `data enc"),
    "datasets": (files("dataset_info.json", "data.arrow"), "a table: not supported yet"),
    "MNIST with dots": (files("train-images.idx3-ubyte"), "an indexed binary file: not supported"),
    "a page and tables": (
        files("README.md", "data/train-00000.parquet"),
        "data/train-00000.parquet is a table: not supported yet",
    ),
    "idx and bin": (files("a.idx", "a.bin"), "an indexed binary file: not supported yet"),
    "MNIST": (files("train-images-idx3-ubyte.gz"), "an indexed binary file: not supported yet"),
    "pickles": (files("a.pkl"), "a pickle: not supported yet, since opening it can run code"),
    "CIFAR-10": (files("batches.meta", "data_batch_1"), "a pickle: not supported yet"),
    "CIFAR-100": (files("meta", "test", "train"), "a pickle: not supported yet"),
    "videos per class": (files("cat/a.mp4", "dog/b.mp4"), "a video: not supported yet"),
    "archives per class": (files("cat.zip", "dog.zip"), "a packed archive: not supported yet"),
    "a run": (files("config.toml", "metrics.jsonl"), "a run of titan_dit: give the [data]"),
    "checkpoints": (
        files("step-00000010/manifest.json"),
        "a run of titan_dit: give the [data]",
    ),
    "notes": (files("notes.txt"), "no dataset found: neither"),
    "nothing": (files(), "no dataset found: the folder is empty"),
}
FILES = {
    "set.zip": "a packed archive: not supported yet",
    "set.tar.gz": "a tar archive (webdataset): not supported yet",
    "set.parquet": "a table: not supported yet",
    "set.pkl": "a pickle: not supported yet",
    "set.mp4": "a video: not supported yet",
    "set.png": "a single picture, but a dataset is a folder per class",
    "set.pt": "a single file of latents, but a dataset is a folder with one file per latent",
    "set": "a file, but a dataset is a folder",
}


def answers(path, monkeypatch):
    """What every way in says about a path."""
    for words in (("pack", "--input", path, "--out", "out"), ("show", path)):
        monkeypatch.setattr(sys, "argv", ["titan_dit", "data", *map(str, words)])
        with pytest.raises(UserError) as caught:
            __main__.main()
        yield str(caught.value)
    with pytest.raises(UserError) as caught:
        Latents(path=str(path)).open()
    yield str(caught.value)


@pytest.mark.parametrize("case", [*PATHS, *FILES])
def test_what_a_path_holds_is_named_with_what_is_supported(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if case in PATHS:
        make, words = PATHS[case]
        (tmp_path / "set").mkdir()
        make(tmp_path / "set")
        path = "set"
    else:
        path, words = case, FILES[case]
        (tmp_path / path).write_bytes(b"x")
    before = sorted(tmp_path.rglob("*"))
    for message in answers(path, monkeypatch):
        assert message.startswith("[data] ")
        assert words in message
        assert FORMATS in message
        assert message.endswith("See docs/data.md.")
        assert "\n" not in message
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("suffix", [".png", ".JPG", ".npy"])
def test_a_flat_folder_is_a_dataset_after_the_command_of_its_message(suffix, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if suffix == ".npy":
        for i in range(3):
            save(tmp_path / "my set" / f"{i}.npy", torch.zeros(4, 8, 8))
    else:
        pictures(tmp_path, classes=("my set",))
        for file in (tmp_path / "my set").iterdir():
            file.rename(file.with_suffix(suffix))
    for message in answers("my set", monkeypatch):
        assert "Put them into one class folder" in message
        assert message.endswith("See docs/data.md.")
    command = message.partition("class folder: ")[2].partition(" (or")[0]
    subprocess.run(command, shell=True, check=True, cwd=tmp_path)
    listing = list_folder(tmp_path / "my set")
    assert (len(listing.names), listing.num_classes) == (3, 1)


def test_folders_of_splits_are_not_taken_for_classes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    splits(tmp_path / "set")
    for message in answers("set", monkeypatch):
        assert "set holds train, val, not classes. Give one of them, such as set/train." in message
    assert list_folder(tmp_path / "set" / "train").num_classes == 2


def test_pictures_are_packed_before_training(tmp_path):
    pictures(tmp_path / "set")
    with pytest.raises(
        UserError, match=r"holds images .*data encode --input.*data pack --input.*then give DIR"
    ):
        Latents(path=str(tmp_path / "set")).open()


def test_classes_may_be_named_like_splits(tmp_path):
    class_folders(tmp_path / "set", classes=("test", "train"))
    assert list_folder(tmp_path / "set").class_names == ("test", "train")


def test_folders_inside_a_class_folder_are_one_error_that_names_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pictures(tmp_path / "set" / "pets")
    for message in answers("set", monkeypatch):
        assert "set/pets holds the folders cat, dog" in message
        assert "If they are the classes, give set/pets." in message
    assert list_folder(tmp_path / "set" / "pets").num_classes == 2
