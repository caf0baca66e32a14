import json

import pytest
import torch
from folders_of_files import class_folders, pair, pictures, save
from refusals import refused_folder

from titan_dit.data.latents import write_shards
from titan_dit.data.listing import Names, layout_of, list_folder, natural


def shards(root):
    zeros = torch.zeros(2, 4, 8, 8)
    write_shards(root, zeros, torch.zeros(2).long(), num_classes=1, source="test")


def test_numbers_are_labels_and_files_come_in_natural_order(tmp_path):
    class_folders(tmp_path, each=12)
    (tmp_path / "0001" / ".hidden").touch()
    found = list_folder(tmp_path)
    assert (found.layout, found.kind, found.num_classes) == ("classes", "latents", 3)
    assert list(found.names)[:12] == [f"0000/{i}.npy" for i in range(12)]
    assert found.labels.tolist() == [0] * 12 + [1] * 12 + [2] * 12
    assert found.class_names == ()


def test_names_are_numbered_in_sorted_order_or_as_the_manifest_lists_them(tmp_path):
    class_folders(tmp_path, classes=("dog", "cat", "emu"), each=1)
    found = list_folder(tmp_path)
    assert found.class_names == ("cat", "dog", "emu")
    assert list(found.names) == ["cat/0.npy", "dog/0.npy", "emu/0.npy"]
    manifest = {"format": "titan_dit.folder/1", "classes": ["emu", "cat", "dog"]}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    found = list_folder(tmp_path)
    assert found.class_names == ("emu", "cat", "dog")
    assert list(found.names) == ["emu/0.npy", "cat/0.npy", "dog/0.npy"]
    assert found.labels.tolist() == [0, 1, 2]


@pytest.mark.parametrize("prefix", ["", "imagenet256_"])
def test_the_features_and_labels_of_fast_dit_are_one_dataset(tmp_path, prefix):
    _, labels = pair(tmp_path, prefix)
    found = list_folder(tmp_path)
    assert (found.layout, found.num_classes) == ("pair", 3)
    assert list(found.names) == [f"{prefix}features/{i}.npy" for i in range(12)]
    assert torch.equal(found.labels, labels)


def stray(root):
    (root / "README.txt").touch()


def empty(root):
    class_folders(root)
    (root / "0003").mkdir()


def deep(root):
    class_folders(root)
    save(root / "0001" / "more" / "0.npy", torch.zeros(4, 8, 8))


def other_file(root):
    class_folders(root)
    (root / "0001" / "notes.txt").touch()


def same_stem(root):
    class_folders(root)
    save(root / "0001" / "0.pt", torch.zeros(4, 8, 8))


def mixed_kinds(root):
    class_folders(root)
    pictures(root, classes=("0003",))


def beside(root):
    class_folders(root)
    stray(root)


def loose(root):
    save(root / "0.npy", torch.zeros(4, 8, 8))


def lone_feature(root):
    pair(root)
    (root / "labels" / "3.npy").unlink()


def lone_label(root):
    pair(root)
    (root / "features" / "3.npy").unlink()


def no_labels(root):
    pair(root)
    (root / "labels").rename(root.parent / "labels")


def unfinished(root):
    (root / "pack.json").write_text('{"plan": "x"}')
    (root / "set-00000.safetensors").touch()


def pair_and_classes(root):
    pair(root)
    class_folders(root)


def two_pairs(root):
    pair(root, "a_")
    pair(root, "b_")


def shards_and_classes(root):
    shards(root)
    class_folders(root)


def shards_and_pair(root):
    shards(root)
    pair(root)


BAD = {
    empty: ("empty class folders: 0003",),
    deep: ("0001: more is neither a latent",),
    other_file: ("0001: notes.txt is neither",),
    same_stem: ("0001: 0.npy and 0.pt are the same sample",),
    mixed_kinds: ("latents (0000/0.npy) and images (0003/0.png): two datasets in one folder",),
    beside: ("README.txt is outside the class folders",),
    loose: ("no dataset found: 1 latent outside of class folders", "mkdir"),
    lone_feature: ("features/3.npy has no file of the same name in labels",),
    lone_label: ("labels/3.npy has no file of the same name in features",),
    no_labels: ("found features, but no labels",),
    unfinished: ("packing is unfinished. Run the same `data pack` command again",),
    pair_and_classes: ("the pair features and labels and the class folders 0000, 0001, 0002",),
    two_pairs: ("the pair a_features and a_labels and the pair b_features and b_labels",),
    shards_and_classes: ("the shards of manifest.json and the class folders 0000", "two datasets"),
    shards_and_pair: ("the pair features and labels and the shards of manifest.json",),
}


@pytest.mark.parametrize("make", BAD)
def test_a_folder_that_is_no_dataset_is_told_why(tmp_path, make):
    (tmp_path / "set").mkdir()
    make(tmp_path / "set")
    message = refused_folder(tmp_path / "set")
    for words in BAD[make]:
        assert words in message


def test_a_picture_of_a_dataset_beside_its_shards_is_no_dataset(tmp_path):
    shards(tmp_path)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "how.txt").touch()
    assert layout_of(tmp_path) == "shards"


def test_options_that_contradict_the_manifest_are_refused(tmp_path):
    class_folders(tmp_path, classes=("a", "b"))
    manifest = {"format": "titan_dit.folder/1", "classes": ["b", "a"], "num_classes": 2}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert "classes is a, b, but manifest.json says b, a" in refused_folder(
        tmp_path, classes=("a", "b")
    )
    assert "num_classes is 3, but manifest.json says 2" in refused_folder(tmp_path, num_classes=3)
    assert list_folder(tmp_path, num_classes=2, classes=["b", "a"]).class_names == ("b", "a")


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        ({"scal": 1}, "unknown key scal"),
        ({"scale": "x"}, "scale"),
        ({"scale": 0}, "scale=0"),
        ({"classes": ["a", "a"]}, "'a' twice"),
        ({"format": "titan_dit.folder/2"}, "titan_dit.folder/1"),
    ],
)
def test_a_manifest_with_mistakes_is_refused(tmp_path, manifest, words):
    class_folders(tmp_path)
    text = json.dumps({"format": "titan_dit.folder/1"} | manifest)
    (tmp_path / "manifest.json").write_text(text)
    assert words in refused_folder(tmp_path)


def test_many_names_are_kept_in_one_block_in_natural_order():
    names = Names(["a/10.npy", "ü/2.npy", "b/\udcff.npy"])
    assert list(names) == ["a/10.npy", "ü/2.npy", "b/\udcff.npy"]
    assert [names[-1], names[-3]] == ["b/\udcff.npy", "a/10.npy"]
    for outside in (3, -4):
        with pytest.raises(IndexError):
            names[outside]
    assert sorted(["10.npy", "9.npy", "a2b10", "a2b9", "2.npy"], key=natural) == [
        *("2.npy", "9.npy", "10.npy", "a2b9", "a2b10")
    ]
